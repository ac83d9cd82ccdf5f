"""What travels from the loader to the strategy: one item is one optimizer step of one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_dcp.plan import IterationPlan

Batch = dict[str, Any]
"""A collated micro-batch before sharding; tensors are ``[B, S, ...]`` or ``[B, ...]``."""


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
