"""What is remembered of a step once it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.plan import IterationPlan

Span = tuple[float, float]
"""Start and end of a micro-batch in seconds since the start of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What happened in one step.

    Attributes:
        epoch, step: position in the permutation.
        plan: the plan of all ranks.
        loss: exact mean of the step's losses over all ranks, the same on every rank.
        count: items that it is the mean of.
        spans: start and end of each micro-batch of this rank, in seconds since the step began.
        seconds: duration of the step up to the vote; without the reduction and the optimizer.
        idle_ratio: measured share of all ranks' time in which no micro-batch ran.
        stray: mean distance of the step's samples between their places in the epoch's order and in the order of
            training, in samples; 0 for fixed steps.
        stray_max: the largest such distance.
    """

    epoch: int
    step: int
    plan: IterationPlan
    loss: float
    count: float
    spans: tuple[Span, ...]
    seconds: float
    idle_ratio: float
    stray: float = 0.0
    stray_max: int = 0
