"""What is remembered of a step once it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dcp.plan import IterationPlan

Span = tuple[float, float]
"""Start and end of a micro-batch in seconds since the start of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of all ranks went, from the vote that ended the step before to the one that ended this step.

    All are rank-seconds: a second in which each of ``W`` ranks does something is ``W`` of them. They add up to ``W``
    times the wall-clock time between the two votes.

    Attributes:
        busy: inside micro-batches.
        idle: between the first and the last micro-batch of any rank, outside of one's own: waiting for other ranks.
        update: reduction of the gradients and the optimizer's update of the step before, and what the two votes
            themselves cost.
        data: waiting for the step's data, also for that of another rank.
        other: everything else between update and first micro-batch: callbacks, logging, Lightning's loop.
    """

    busy: float = 0.0
    idle: float = 0.0
    update: float = 0.0
    data: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Rank-seconds of the step."""
        return self.busy + self.idle + self.update + self.data + self.other


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
        times: where the time of all ranks went.
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
    times: StepTimes = field(default_factory=StepTimes)
    stray: float = 0.0
    stray_max: int = 0
