"""``StochasticWeightAveraging`` over ZeRO-1, where every rank has whole weights after each step.

Lightning refuses the callback under every DeepSpeed strategy, as the weights of stage 3 are divided. Two of its hooks
are replaced on the object that the user made; everything else is Lightning's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_dcp.upstream import begin_average


def adapt_averaging(callbacks: Iterable[pl.Callback], module: pl.LightningModule) -> None:
    """Make ``StochasticWeightAveraging`` work here; called before the callbacks' ``setup``.

    Raises:
        MisconfigurationException: the model has a batch norm: the callback would run an epoch of its own then, without
            optimizer steps.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            if module.trainer.state.fn == "fit" and callback.pl_module_contains_batch_norm(module):
                raise MisconfigurationException(
                    f"StochasticWeightAveraging on {type(module).__name__}, which has a batch norm: its statistics "
                    "would need an epoch without optimizer steps, which DCPStrategy cannot plan. Use the callback "
                    "WeightAveraging, or another norm"
                )
            _adapt(callback)


def _adapt(callback: StochasticWeightAveraging) -> None:
    def setup(_trainer: pl.Trainer, pl_module: pl.LightningModule, **_stage: str) -> None:
        begin_average(callback, pl_module)

    def on_train_epoch_start(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with _own_optimizers(trainer):
            type(callback).on_train_epoch_start(callback, trainer, pl_module)

    vars(callback).update(setup=setup, on_train_epoch_start=on_train_epoch_start)


@contextmanager
def _own_optimizers(trainer: pl.Trainer) -> Iterator[None]:
    """Let ``trainer.optimizers`` be the user's own: torch makes no schedule for DeepSpeed's."""
    strategy: Any = trainer.strategy
    wrapped = strategy.optimizers
    strategy.optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in wrapped]
    try:
        yield
    finally:
        strategy.optimizers = wrapped
