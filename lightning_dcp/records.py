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
    """

    epoch: int
    step: int
    plan: IterationPlan
    loss: float
    count: float
    spans: tuple[Span, ...]
    seconds: float
    idle_ratio: float
