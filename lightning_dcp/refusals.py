"""What cannot work together with plans that change every step, refused before a process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
)
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor

from lightning_dcp.upstream import gives_first_weights_back

SUPPORTED_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise on the first setting of the Trainer or the module that is not supported.

    Raises:
        MisconfigurationException: with what was got, what is allowed and what to do.
    """
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) together with DCPStrategy: only 1 is "
            "allowed, since the planner chooses the number of micro-batches of each step. Set the samples of a step "
            "with DCPDataModule(global_batch_size=...)"
        )
    if trainer.state.fn == "fit" and not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization=False: DCPStrategy supports automatic optimization "
            "only, since it runs training_step once per micro-batch. Remove the line and return the loss"
        )
    precision = str(trainer.precision)
    if precision not in SUPPORTED_PRECISIONS:
        raise MisconfigurationException(
            f"Trainer(precision={precision!r}) together with DCPStrategy: allowed are {SUPPORTED_PRECISIONS}, as no "
            "other was compared with one device. Use bf16-mixed where memory or speed asks for half precision"
        )
    if trainer.gradient_clip_algorithm == "value":
        raise MisconfigurationException(
            "Trainer(gradient_clip_algorithm='value') together with DCPStrategy: allowed is 'norm', as DeepSpeed clips "
            "no single values. Use gradient_clip_algorithm='norm'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check_callback(callback)


def check_parameters(module: pl.LightningModule) -> None:
    """Refuse parameters that DeepSpeed cannot hold.

    Raises:
        MisconfigurationException: a trainable parameter has no dimension, or nothing is left to train.
    """
    if module.trainer.state.fn == "fit" and not any(p.requires_grad for p in module.parameters()):
        raise MisconfigurationException(
            f"{type(module).__name__} has no parameter with requires_grad=True, so there is nothing to train; leave "
            "at least one parameter trainable"
        )
    scalars = [name for name, p in module.named_parameters() if p.requires_grad and p.dim() == 0]
    if scalars:
        raise MisconfigurationException(
            f"the parameters {scalars} have no dimension, which DeepSpeed ZeRO does not support; make them "
            "tensors of shape (1,)"
        )


@contextmanager
def explained_optimizers() -> Iterator[None]:
    """Say of several optimizers what is allowed here: Lightning's advice is manual optimization, which is refused.

    Raises:
        MisconfigurationException: ``configure_optimizers`` returned more than one optimizer.
    """
    try:
        yield
    except (RuntimeError, MisconfigurationException) as error:
        if "multiple optimizers" not in str(error) and "single optimizer" not in str(error):
            raise
        raise MisconfigurationException(
            "configure_optimizers returned more than one optimizer (or schedule); DCPStrategy allows one of each, "
            "since a plan ends in one optimizer step. Use one optimizer with several parameter groups"
        ) from error


def _check_callback(callback: pl.Callback) -> None:
    reasons: dict[type[pl.Callback], str] = {
        ThroughputMonitor: "it takes every rank's batch for equal; DCPCallback reports throughput from the plans",
        BatchSizeFinder: "the planner chooses the batch size of each micro-batch from the profile",
        LearningRateFinder: "its schedule cannot drive the optimizer of DeepSpeed; look for the rate on one device",
        BaseFinetuning: "DeepSpeed divides the parameters over the ranks once, so no group can be added within a fit; "
        "train the head in one fit, then unfreeze and start a second one from its weights",
        GradientAccumulationScheduler: "the planner chooses the number of micro-batches of each step",
    }
    if isinstance(callback, ModelPruning) and gives_first_weights_back(callback):
        raise MisconfigurationException(
            "The callback ModelPruning(use_lottery_ticket_hypothesis=True) cannot be used with DCPStrategy: the first "
            "weights that it gives back would be lost at the next step, which goes on from the optimizer's own copies. "
            "Use use_lottery_ticket_hypothesis=False"
        )
    for kind, reason in reasons.items():
        if isinstance(callback, kind):
            raise MisconfigurationException(
                f"The callback {kind.__name__} cannot be used with DCPStrategy: {reason}. Remove the callback"
            )
