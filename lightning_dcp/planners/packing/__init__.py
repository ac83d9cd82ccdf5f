"""The balanced planner for packed rows: micro-batches of mixed lengths in one row, with a proven lower bound."""

from __future__ import annotations

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.packing.bound import Bound, packed_lower_bound
from lightning_dcp.planners.packing.finish import finish
from lightning_dcp.planners.packing.menu import Menu
from lightning_dcp.planners.packing.trials import search
from lightning_dcp.planners.protocol import PlanRequest

__all__ = ["packed_lower_bound", "plan_packed"]


def plan_packed(request: PlanRequest, max_moves: int) -> IterationPlan:
    """Plan one optimizer step of packed rows, with the least makespan found and its lower bound.

    Moldable scheduling on the laminar family of groups: for targets of the makespan near the lower bound each
    sample gets the group size and the recompute of least rank-time that meet the target; wide groups are placed
    first, the longest sample on the group that is free first, in a row that has room for it; then groups of equal
    size exchange samples until their loads are even, and the busiest rank gives samples or rows to any other.

    - Equal lengths are interchangeable: neither the order of the samples nor their ids change the makespan.
    - ``limits.max_step_factor`` is not used: the step's samples are given, so its length is no choice.

    Args:
        request: samples of one axis, cost model, world and limits.
        max_moves: most rounds of exchanges and most single changes in each try, from 0.

    Raises:
        InfeasibleError: a sample fits no allowed setting.
        ValueError: samples of more axes, ``exact_shapes``, or world and profile have no size in common.
    """
    menu = Menu.build(request)
    if not len(menu.lengths):
        return IterationPlan(world_size=request.world.world_size, micro_batches=())
    bound = Bound.build(menu)
    least = bound.least_makespan()
    return finish(search(bound, least, max_moves), least)
