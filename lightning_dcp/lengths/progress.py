"""The progress bar of the readers."""

from __future__ import annotations

from typing import Any

DELAY = 0.5
"""Seconds before a bar shows: what is over sooner, with a result or an error, needs none."""


def bar(total: int, unit: str, shown: bool) -> Any:
    """A bar up to ``total``, a context manager with ``update(amount)``; silent unless ``shown``."""
    # Imported when a file is read: a command's --help must not wait for it.
    from tqdm import tqdm  # type: ignore[import-untyped]

    options = {"unit": unit, "unit_scale": True, "desc": "reading lengths", "leave": False, "delay": DELAY}
    return tqdm(total=total, disable=not shown, **options)
