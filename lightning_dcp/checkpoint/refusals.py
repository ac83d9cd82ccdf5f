"""Optimizers whose groups or state would not be those that the user made."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what DeepSpeed would take for something else.

    Raises:
        MisconfigurationException: with what was got and what to do.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise MisconfigurationException(
            "configure_optimizers returned an Adagrad, which DeepSpeed replaces by one of its own without groups and "
            "without the schedule; use another optimizer, such as AdamW or RMSprop"
        )
    for index, group in enumerate(optimizer.param_groups):
        if not any(p.requires_grad for p in group["params"]):
            raise MisconfigurationException(
                f"parameter group {index} of the optimizer has no parameter with requires_grad=True, which DeepSpeed "
                "does not support; leave the group out in configure_optimizers"
            )
