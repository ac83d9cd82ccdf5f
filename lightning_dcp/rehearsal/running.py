"""A fit that ends before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_dcp.rehearsal.facts import DryRun, collect
from lightning_dcp.report import most_varied, plot_timeline
from lightning_dcp.strategy import DCPStrategy


def dry_run(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
    *,
    steps: int = 3,
    picture: str | Path | None = None,
    **fit: Any,
) -> DryRun:
    """Do all of ``setup()`` of a fit on the real ranks, plan the first steps and stop; called by every rank.

    Process groups, engine, self-check and profile are those of the fit, and a setup that fails raises its own error.
    The fit ends before ``on_train_start``: no validation, no step, no checkpoint, nothing from a logger. (A profile
    that is kept in a file is written.) The trainer can fit afterwards.

    Args:
        trainer: with a ``DCPStrategy``.
        model: as for ``trainer.fit``.
        datamodule: as for ``trainer.fit``.
        steps: how many steps to plan, from 1.
        picture: PNG file for the plan of them that shows most; needs matplotlib. Written by rank 0.
        fit: further arguments of ``trainer.fit``, such as ``ckpt_path``.

    Returns:
        What was found; ``print`` it on rank 0.

    Raises:
        MisconfigurationException: the trainer has another strategy.
        ValueError: ``steps`` is below one.
        ImportError: a picture is asked for, and matplotlib is not installed.
    """
    if not isinstance(trainer.strategy, DCPStrategy):
        raise MisconfigurationException(
            f"a dry run shows plans, which {type(trainer.strategy).__name__} does not make; leave out the strategy, or "
            "use lightning_dcp.DCPStrategy"
        )
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps is {steps!r}; allowed are integers from 1")
    stop = _Stop(steps)
    with _quiet(trainer, stop):
        trainer.fit(model, datamodule=datamodule, **fit)
    assert stop.found is not None
    if picture is not None and trainer.is_global_zero and stop.found.plans:
        plans = stop.found.plans
        plot_timeline(plans[most_varied(plans)], None, picture)
    return stop.found


class _Stop(pl.Callback):
    """Collects behind ``setup()``, then leaves the Trainer without a batch."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.found: DryRun | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """The first hook behind the strategy's setup()."""
        strategy = trainer.strategy
        assert isinstance(strategy, DCPStrategy)
        self.found = collect(strategy, str(trainer.precision), self.steps)
        trainer.limit_train_batches = 0


@contextmanager
def _quiet(trainer: pl.Trainer, stop: _Stop) -> Iterator[None]:
    """No sanity check, and loggers that write nothing, until the end."""
    before = trainer.loggers, trainer.num_sanity_val_steps, trainer.limit_train_batches
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(stop)
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    trainer.num_sanity_val_steps = 0
    try:
        yield
    finally:
        # Anew: a model with configure_callbacks() makes the Trainer build another list.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(stop)
        trainer.loggers, trainer.num_sanity_val_steps, trainer.limit_train_batches = before
