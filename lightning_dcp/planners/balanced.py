"""The default planner: the least makespan for the samples of a step, with a proven distance from the optimum."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.lockstep import plan_lockstep
from lightning_dcp.planners.options import check_flags, check_integers
from lightning_dcp.planners.packing import plan_packed
from lightning_dcp.planners.padded import plan_padded
from lightning_dcp.planners.protocol import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Moldable scheduling of the given samples on the laminar family of groups.

    1. A dynamic program over the samples, sorted by length, cuts them into micro-batches of least rank-time, over all
       batch sizes and all widths of groups that end within the lower bound. Its values are prices of the samples, and
       prices that no micro-batch is below prove a lower bound that knows of padding.
    2. For targets a little above that bound, by bisection, the samples are poured into the ranks: wide groups first,
       the longest samples first, as many at once as the cut has them, fewer where the room ends, always where least
       room is left over. If the result is not close to the bound, once more with a cut made for it.
    3. The busiest rank gives micro-batches away, whole or in part, to other groups, to neighbours in length or to
       groups of another width, until no such move helps.

    Recomputed layers are the fewest that fit each micro-batch, so a smaller one may be the faster for each sample.

    The makespan is never above that of single samples dealt longest first (``Static()``), unless
    ``limits.min_micro_batches`` asks for more micro-batches than the best plan has.

    - ``limits.packing``: rows of mixed lengths, see :func:`~lightning_dcp.planners.packing.plan_packed`.
    - ``limits.max_step_factor`` is not used: the step's samples are given, so its length is no choice.

    Attributes:
        max_moves: most moves of the improvement.
        lockstep: plan for an engine that communicates in every micro-batch, see
            :func:`~lightning_dcp.planners.lockstep.plan_lockstep`.

    Raises:
        ValueError: ``max_moves`` is no integer from 0, or ``lockstep`` no flag.
    """

    max_moves: int = 200
    lockstep: bool = False
    name: str = field(default="balanced", init=False)
    draws: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_integers(self, 0, "max_moves")
        check_flags(self, "lockstep")

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan one optimizer step.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
            ValueError: world and profile have no size in common, or the limits and the mode exclude each other.
        """
        if self.lockstep:
            return plan_lockstep(request, self.max_moves)
        if request.limits.packing:
            return plan_packed(request, self.max_moves)
        return plan_padded(request, self.max_moves)
