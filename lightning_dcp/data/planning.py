"""From the samples of a step to its plan: the same pure function on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.plan import IterationPlan, MicroBatch, PlanError
from lightning_dcp.planners.protocol import Limits, Planner, PlanRequest
from lightning_dcp.topology import Block, World


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
        PlanError: a sample fits no setting, or the plan does not hold exactly the samples of the step, or uses
            something that this run does not have or has switched off.
    """
    request = PlanRequest(
        sample_ids=sample_ids,
        shapes=shapes[sample_ids],
        cost=context.cost,
        world=context.world,
        limits=context.limits,
    )
    plan = context.planner.plan(request)
    if not isinstance(plan, IterationPlan):
        raise PlanError(
            f'planner "{context.planner.name}" gave {plan!r:.100}; plan(request) must return an IterationPlan'
        )
    planned = sorted(i for m in plan.micro_batches for i in m.sample_ids)
    if planned != sorted(request.ids) or plan.world_size != context.world.world_size:
        missing = sorted(set(request.ids) - set(planned))[:5]
        foreign = sorted(set(planned) - set(request.ids))[:5]
        raise PlanError(
            f'planner "{context.planner.name}" gave a plan for {plan.world_size} ranks that lacks the samples '
            f"{missing} and has the foreign samples {foreign}; it must plan each sample of the step once, for "
            f"{context.world.world_size} ranks"
        )
    blocks = frozenset(request.world.blocks)
    for micro_batch in plan.micro_batches:
        reason = _not_allowed(micro_batch, request, blocks)
        if reason is not None:
            raise PlanError(
                f'planner "{context.planner.name}" planned the samples {list(micro_batch.sample_ids[:5])} with {reason}'
            )
    return plan


def _not_allowed(m: MicroBatch, request: PlanRequest, blocks: frozenset[Block]) -> str | None:
    """What a micro-batch uses that the run lacks, or that the self-check found to change the result."""
    layers, limits = request.cost.num_layers, request.limits
    counts = m.recompute or (0,) * len(layers)
    if (m.first_rank, m.sp_size) not in blocks:
        return f"the group (first_rank, sp_size) = {(m.first_rank, m.sp_size)}; allowed are {request.world.blocks}"
    if len(counts) != len(layers) or any(r > n for r, n in zip(counts, layers, strict=True)):
        return f"recompute = {m.recompute}; allowed are counts from 0 up to {layers}"
    if limits.recompute == "none" and any(counts):
        return f"recompute = {m.recompute}; recomputation is switched off for this run"
    if limits.exact_shapes and any(shape != m.padded_shape for shape in m.shapes):
        return (
            f"padding to {m.padded_shape}; padding is switched off for this run, as it changes the model's result"
        )
    return None
