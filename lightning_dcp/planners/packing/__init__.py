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

    1. Prices: for fixed ``(p, r)`` a row costs a fixed part and a sum over its samples (:mod:`.menu`, :mod:`.levels`).
    2. The lower bound: shares of the fixed part (:mod:`.bound`) and whole rows only (:mod:`.counting`).
    3. A first placement: each sample gets the group size and recompute of least rank-time that end within the bound;
       wide groups first, the longest sample on the group that is free first, in a row with room (:mod:`.construct`).
    4. Groups of equal size exchange samples until their loads are even (:mod:`.exchange`); the busiest rank gives
       samples or rows to any other (:mod:`.improve`).
    5. If that is not close to the bound, the same from other placements: for other targets, poured up to a target
       found by bisection, first-fit decreasing; the best counts (:mod:`.trials`).

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
