"""A user's own train loader, taken over."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def taken_over(loaders: Any, trainer: pl.Trainer) -> Any:
    """What trains in the place of the user's train loader.

    Args:
        loaders: what the user gave or the hook returned.
        trainer: that asks for it.
    """
    del trainer
    return loaders
