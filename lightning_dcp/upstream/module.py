"""Private names of the user's module and of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from lightning_dcp.data.batch import DCPBatch
from lightning_dcp.data.evaluation import EvaluationItem


def gives_first_weights_back(callback: ModelPruning) -> bool:
    """Whether pruning starts again from the first weights (lottery ticket hypothesis), which it sets by ``.data``."""
    return bool(callback._use_lottery_ticket_hypothesis)


@contextmanager
def steps_pass_transfer_hooks(module: pl.LightningModule) -> Iterator[Callable[[Any, int], Any]]:
    """Keep the Trainer from handing a whole step to ``on_before_batch_transfer``.

    The hook is written for one batch, and is called once per micro-batch just before its use. Yields the original
    bound method for that.
    """
    original = module._on_before_batch_transfer

    def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        ours = isinstance(batch, DCPBatch | EvaluationItem)
        return batch if ours else original(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = before_transfer
    try:
        yield original
    finally:
        module.__dict__.pop("_on_before_batch_transfer", None)
