"""Sequence parallelism over the group of the running micro-batch.

Outside a micro-batch and in a group of one rank the exchanges are the identity, so that a model written with
them also runs without the strategy.
"""

from __future__ import annotations

from lightning_dcp.sequence_parallel.attention import attention, local_attention
from lightning_dcp.sequence_parallel.context import current
from lightning_dcp.sequence_parallel.counting import once
from lightning_dcp.sequence_parallel.loss import loss_sum
from lightning_dcp.sequence_parallel.random import rand_per_sample
from lightning_dcp.sequence_parallel.ulysses import gather, split, switch

__all__ = [
    "attention",
    "current",
    "gather",
    "local_attention",
    "loss_sum",
    "once",
    "rand_per_sample",
    "split",
    "switch",
]
