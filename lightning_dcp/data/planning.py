"""From the samples of a step to its plan: the same pure function on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        sample_ids: samples of the step in the order of the epoch; for a planner that draws, those that it may
            choose from. A sample that an epoch has again goes by other ids, see
            :class:`~lightning_dcp.data.order.EpochOrder`.
        shapes: shapes of all samples of the dataset, ``[n, axes]``.

    Raises:
        PlanError: a sample fits no setting, or the plan does not hold the samples that it must, or uses something
            that this run does not have or has switched off.
    """
    request = request_of(context, sample_ids, shapes)
    plan = context.planner.plan(request)
    if not isinstance(plan, IterationPlan):
        raise PlanError(
            f'planner "{context.planner.name}" gave {plan!r:.100}; plan(request) must return an IterationPlan'
        )
    reason = (_wrongly_drawn if context.planner.draws else _not_all)(np.sort(samples_of(plan)), request)
    if reason is None and plan.lockstep:
        reason = (
            "is in lockstep, which this engine does not run; plan with lockstep=False (simulating it is possible)"
        )
    if reason is None and plan.world_size != context.world.world_size:
        reason = f"does not fit this run of {context.world.world_size} ranks"
    if reason is not None:
        raise PlanError(f'planner "{context.planner.name}" gave a plan for {plan.world_size} ranks that {reason}')
    blocks = frozenset(request.world.blocks)
    for micro_batch in plan.micro_batches:
        reason = _not_allowed(micro_batch, request, blocks)
        if reason is not None:
            raise PlanError(
                f'planner "{context.planner.name}" planned the samples {list(micro_batch.sample_ids[:5])} with {reason}'
            )
    return plan


def request_of(context: PlanningContext, sample_ids: IntArray, shapes: IntArray) -> PlanRequest:
    """What a planner is asked; see :func:`plan_step`."""
    return PlanRequest(
        sample_ids=sample_ids,
        shapes=shapes[sample_ids % len(shapes)],
        cost=context.cost,
        world=context.world,
        limits=context.limits,
    )


def samples_of(plan: IterationPlan) -> IntArray:
    """Ids of a plan's samples, int64, in the order of its micro-batches."""
    return np.asarray(plan.sample_ids, dtype=np.int64)


def _not_all(planned: IntArray, request: PlanRequest) -> str | None:
    """How sorted samples differ from those of the step."""
    wanted = np.sort(request.sample_ids)
    if np.array_equal(planned, wanted):
        return None
    missing, foreign = _without(wanted, planned), _without(planned, wanted)
    return (
        f"lacks the samples {missing[:5].tolist()} and has the foreign samples {foreign[:5].tolist()}; it must plan "
        "each sample of the step once"
    )


def _wrongly_drawn(planned: IntArray, request: PlanRequest) -> str | None:
    """What is wrong with sorted samples that a planner chose among the offered ones."""
    foreign, first = _without(planned, np.sort(request.sample_ids)), request.sample_ids[:1]
    if len(foreign):
        return f"has the samples {foreign[:5].tolist()}, which were not offered; it must draw among those that are"
    if len(_without(first, planned)):
        return (
            f"lacks the first offered sample, {first[0]}; it must draw that one in every step, so that none waits for "
            "ever"
        )
    return None


def _without(ids: IntArray, others: IntArray) -> IntArray:
    """Those of ``ids`` that are not among the sorted ``others``."""
    if not len(others):
        return ids
    index = np.minimum(np.searchsorted(others, ids), len(others) - 1)
    return np.asarray(ids[others[index] != ids])


def _not_allowed(m: MicroBatch, request: PlanRequest, blocks: frozenset[Block]) -> str | None:
    """What a micro-batch uses that the run lacks, or that the self-check found to change the result."""
    layers, limits = request.cost.num_layers, request.limits
    counts = m.recompute or (0,) * len(layers)
    if m.packed:
        return (
            "a packed row of several samples; such plans can be made and simulated but not trained yet, so train with "
            "a planner that pads, for example planner='balanced'"
        )
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
