"""What travels from the loader to the strategy: one item is one optimizer step of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_dcp.plan import IterationPlan

Batch = dict[str, Any]
"""A collated micro-batch before sharding; tensors are ``[B, S, ...]`` or ``[B, ...]``."""


class UncountedError(ValueError):
    """What a batch's loss is the mean of is unknown; no error where ``training_step`` returns its own count."""


def labels_of(batch: Any, key: str) -> Any:
    """The labels of a batch; also where it stands alone in a collection. ``None`` where it has none by that key."""
    while not (isinstance(batch, Mapping) and key in batch):
        if not isinstance(batch, Mapping | list | tuple) or len(batch) != 1:
            return None
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch[key]


def is_divisible(batch: Any) -> bool:
    """Whether a batch has its sequences by key, so that a group of ranks can share it; also alone in a collection."""
    while isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    return isinstance(batch, Mapping)


class StepPlan:
    """An opaque holder of a step's plan.

    Lightning walks through batches with ``apply_to_collection``, which tries to rebuild every dataclass it meets
    and fails on frozen ones; it leaves an object of an unknown plain class alone.
    """

    __slots__ = ("iteration",)

    def __init__(self, iteration: IterationPlan) -> None:
        self.iteration = iteration


class DCPBatch(NamedTuple):
    """One optimizer step of one rank.

    Attributes:
        epoch: epoch of the permutation that the samples come from.
        step: number of the step in its epoch, from 0.
        plan: what all ranks do in the step.
        data: one collated, unsharded micro-batch for each of ``plan.iteration.of_rank(rank)``, in that order.
        error: why the data could not be read, with the traceback; ``data`` is empty then. The strategy raises it
            on every rank: an exception here would leave the other ranks waiting.
    """

    epoch: int
    step: int
    plan: StepPlan
    data: tuple[Batch, ...]
    error: str | None = None
