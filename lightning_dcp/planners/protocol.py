"""What every planner takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_dcp.cost import CostModel, RecomputePolicy
from lightning_dcp.plan import IterationPlan, PlanError, Shape
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must respect.

    Attributes:
        memory_bytes: predicted peak per rank that no micro-batch may pass.
        max_batch_size: most samples in one micro-batch.
        max_tokens: most padded tokens of one micro-batch per rank.
        min_micro_batches: ``G_min`` (paper, Appendix C).
        max_step_factor: ``G_max`` (paper, Appendix C).
        recompute: ``"auto"``, ``"none"`` or ``"full"``.
        exact_shapes: nothing is padded, since the model's result depends on it: only samples of equal shape share a
            micro-batch, on a group whose size divides their first axis.
        packing: micro-batches may hold samples of mixed lengths in one row.
    """

    memory_bytes: int
    max_batch_size: int | None = None
    max_tokens: int | None = None
    min_micro_batches: int = 1
    max_step_factor: float | None = None
    recompute: RecomputePolicy = "auto"
    exact_shapes: bool = False
    packing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The samples of one optimizer step and everything that a plan of them depends on.

    Attributes:
        sample_ids: positions in the dataset, in the order of the permutation, without repeats.
        shapes: size of each sample.
        cost: predicted times and bytes.
        world: ranks and groups.
        limits: what the plan must respect.
    """

    sample_ids: tuple[int, ...]
    shapes: tuple[Shape, ...]
    cost: CostModel
    world: World
    limits: Limits


class InfeasibleError(PlanError):
    """A sample fits no allowed setting; the message names it, its length and the limit."""


@runtime_checkable
class Planner(Protocol):
    """A pure function from a step's samples to a plan: no clock, no randomness, no state.

    Attributes:
        name: as in ``DCPStrategy(planner=name)``.
        draws: whether the planner chooses which of the offered samples the step contains (the paper's planners
            do); otherwise it must plan all of them.
        lockstep: whether all ranks run the same number of micro-batches.
    """

    @property
    def name(self) -> str:
        """As in ``DCPStrategy(planner=name)``."""
        ...

    @property
    def draws(self) -> bool:
        """Whether the planner chooses the samples."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run equally many micro-batches."""
        ...

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan one optimizer step.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
        """
        ...
