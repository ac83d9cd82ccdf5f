"""From the samples of a step to its plan: the same pure function on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.data.lengths import shape_of
from lightning_dcp.plan import IterationPlan, PlanError
from lightning_dcp.planners.protocol import Limits, Planner, PlanRequest
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """What the loader needs from the strategy to plan; equal on all ranks but for ``rank``."""

    rank: int
    planner: Planner
    cost: CostModel
    world: World
    limits: Limits


def plan_step(context: PlanningContext, sample_ids: IntArray, shapes: IntArray) -> IterationPlan:
    """Plan one optimizer step.

    Args:
        context: planner and what it needs.
        sample_ids: samples of the step in the order of the permutation.
        shapes: shapes of all samples of the dataset, ``[n, axes]``.

    Raises:
        PlanError: a sample fits no setting, or the plan does not hold exactly the samples of the step.
    """
    request = PlanRequest(
        sample_ids=tuple(sample_ids.tolist()),
        shapes=tuple(shape_of(row) for row in shapes[sample_ids]),
        cost=context.cost,
        world=context.world,
        limits=context.limits,
    )
    plan = context.planner.plan(request)
    planned = sorted(i for m in plan.micro_batches for i in m.sample_ids)
    if planned != sorted(request.sample_ids) or plan.world_size != context.world.world_size:
        missing = sorted(set(request.sample_ids) - set(planned))[:5]
        foreign = sorted(set(planned) - set(request.sample_ids))[:5]
        raise PlanError(
            f'planner "{context.planner.name}" gave a plan for {plan.world_size} ranks that lacks the samples '
            f"{missing} and has the foreign samples {foreign}; it must plan each sample of the step once, for "
            f"{context.world.world_size} ranks"
        )
    return plan
