"""What a value that user code logs counts, where micro-batches hold different numbers of items."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl

from lightning_dcp.upstream import set_log_batch_size


@contextmanager
def weighted_logs(trainer: pl.Trainer, weight: float) -> Iterator[None]:
    """Let every ``self.log`` inside count with a weight instead of a batch size that Lightning guesses.

    Args:
        trainer: whose results are logged to.
        weight: items that the values are means over; with 0 they do not count.
    """
    set_log_batch_size(trainer, weight)
    yield
