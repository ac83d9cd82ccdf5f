"""Checks of a planner's own arguments."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import Any, get_args

from lightning_dcp.cost import RecomputePolicy


def check_integers(planner: Any, minimum: int, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Refuse attributes that are no integers of at least ``minimum``; those in ``optional`` may be ``None``.

    Raises:
        ValueError: names the first such attribute.
    """
    for name in (*names, *optional):
        value = getattr(planner, name)
        if value is None and name in optional:
            continue
        if type(value) is not int or value < minimum:
            also = ", or None" if name in optional else ""
            raise ValueError(f"{name}={value!r}; allowed are integers from {minimum}{also}")


def check_flags(planner: Any, *names: str) -> None:
    """Refuse attributes that are neither ``True`` nor ``False``.

    Raises:
        ValueError: names the first such attribute.
    """
    for name in names:
        if not isinstance(getattr(planner, name), bool):
            raise ValueError(f"{name}={getattr(planner, name)!r}; allowed are True and False")


def check_policy(recompute: object) -> None:
    """Refuse a recompute policy that does not exist.

    Raises:
        ValueError: names it.
    """
    if recompute not in get_args(RecomputePolicy):
        raise ValueError(f"recompute={recompute!r}; allowed are {get_args(RecomputePolicy)}")


def check_factor(name: str, factor: object) -> None:
    """Refuse what is neither ``None`` nor a finite number from 1.

    Raises:
        ValueError: names it.
    """
    if factor is None:
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (isfinite(factor) and factor >= 1):
        raise ValueError(f"{name}={factor!r}; allowed are finite numbers from 1, or None")


def allowed_options(planner: type[Any]) -> tuple[str, ...]:
    """Names of a planner's arguments."""
    if hasattr(planner, "__dataclass_fields__"):
        return tuple(f.name for f in fields(planner) if f.init)
    return ("file",)
