"""The Trainer's closure of an optimizer step, which runs once for each micro-batch."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor


def check_closure(closure: Any) -> None:
    """Refuse another closure than the Trainer's: its zero_grad could not be skipped, and gradients would be lost.

    Raises:
        MisconfigurationException: an override of ``optimizer_step`` wrapped or dropped it.
    """
    if not isinstance(closure, Closure):
        raise MisconfigurationException(
            f"optimizer.step() got the closure {closure!r}; allowed is the optimizer_closure that the Trainer hands to "
            "LightningModule.optimizer_step, as it is, since it runs once for each micro-batch. In the override call "
            "optimizer.step(closure=optimizer_closure)"
        )


def skip_zero_grad(closure: Any) -> None:
    """Make a replayed closure keep the gradients of the micro-batches before it.

    The closure runs step, zero_grad, backward. ``optimizer.zero_grad`` must run at the first micro-batch only;
    Lightning decides that by a modulo of the batch index, which cannot express a number that changes every step.
    """
    closure._zero_grad_fn = None


def set_closure_loss(closure: Any, loss: Tensor) -> None:
    """Let ``outputs["loss"]`` of ``on_train_batch_end`` be the step's mean instead of the last micro-batch's loss."""
    closure._result.loss = loss
