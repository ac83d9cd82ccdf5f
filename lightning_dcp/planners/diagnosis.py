"""Why a step lasts longer than its lower bound: one sentence that names the cause and what can be done.

The ranks' time of a step is ``W`` times its makespan. Beyond the lower bound it goes into waiting, into padding, and
into micro-batches whose settings cost more than the cheapest that the bound counts on. The largest of the three parts
is explained, from the request and the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.assembly import pad
from lightning_dcp.planners.bound import lower_bound, padded_lower_bound
from lightning_dcp.planners.protocol import PlanRequest

_ANY_MEMORY = 2**60
_MUCH = 0.9
"""The memory limit is the cause where the bound without it is below this part of the bound."""
_MOST = 0.5
"""Padding is the cause where it explains this part of the gap; a sample dominates whose own time is this part of the
makespan."""
_OUTSTANDING = 2.0
"""And that takes at least so many times the ranks' time of the mean sample."""
_FEW = 8.0
"""Micro-batches per rank below which they are too few to even out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Nanoseconds per rank between bound and makespan, by where they go."""

    waiting: float
    padding: float
    settings: float

    @property
    def largest(self) -> str:
        names = ("waiting", "padding", "settings")
        return max(names, key=lambda name: float(getattr(self, name)))


def diagnose(request: PlanRequest, plan: IterationPlan) -> str:
    """Name the cause of a plan's gap.

    Args:
        request: the samples that the plan holds (not all that were offered), and what it was made with.
        plan: the plan.

    Returns:
        A sentence that begins with the cause: ``too few samples in a step``, ``one sample dominates``, ``memory``,
        ``padding``, ``G_min``, or ``the planner``, where none of the others explains it; ``no time`` where the step
        takes none by prediction.
    """
    if not plan.makespan:
        return (
            f"no time: by the profile the {plan.num_samples} samples of the step take none, so there is no gap. "
            "Profile again with longer samples, or larger batches, if they do"
        )
    bound = plan.lower_bound or lower_bound(request)
    parts = _parts(request, plan, bound)
    padded = _padded_bound(request, plan)
    if parts.largest == "padding" or padded - bound >= _MOST * (plan.makespan - bound):
        return _padding(plan, parts, padded / bound - 1 if bound else 0.0)
    found = _least_accumulation(request, plan) if parts.largest == "settings" else None
    return found or _dominating(request, plan) or _memory(request) or _few(plan) or _planner(parts)


def _parts(request: PlanRequest, plan: IterationPlan, bound: int) -> _Parts:
    """Where the time beyond the bound goes: the three parts add up to ``makespan - bound``."""
    worked = sum(m.sp_size * m.nanoseconds for m in plan.micro_batches) / plan.world_size
    needed = sum(m.sp_size * _unpadded(request, m) for m in plan.micro_batches) / plan.world_size
    return _Parts(waiting=plan.makespan - worked, padding=worked - needed, settings=needed - bound)


def _unpadded(request: PlanRequest, m: MicroBatch) -> float:
    """Time of a micro-batch if each of its samples were as long as the others are padded to be: its own length."""
    if m.packed:
        return float(m.nanoseconds)

    @cache
    def time(shape: tuple[int, ...]) -> int:
        return request.cost.nanoseconds(m.batch_size, pad([shape], m.sp_size), m.sp_size, m.recompute)

    return min(sum(time(shape) for shape in m.shapes) / m.batch_size, float(m.nanoseconds))


def _padded_bound(request: PlanRequest, plan: IterationPlan) -> int:
    """What no plan that pads these samples can beat; 0 where rows are packed."""
    packed = request.limits.packing or any(m.packed for m in plan.micro_batches)
    return 0 if packed else padded_lower_bound(request)


def _padding(plan: IterationPlan, parts: _Parts, least: float) -> str:
    least_text = (
        f", and no plan that pads them comes nearer to the bound than {least:.0%}" if least >= 0.005 else ""
    )
    return (
        "padding: samples run with others of other lengths, or with too few. This plan spends "
        f"{parts.padding / plan.makespan:.0%} of the ranks' time on padding{least_text}. Put more samples into a step, "
        "so that more of them have similar lengths"
    )


def _least_accumulation(request: PlanRequest, plan: IterationPlan) -> str | None:
    """Raising all g to ``G_min`` multiplies the largest by the least factor, so it ends below twice ``G_min``."""
    minimum, most = request.limits.min_micro_batches, _most_micro_batches(plan)
    if minimum <= 1 or most >= 2 * minimum:
        return None
    mean = plan.num_samples / len(plan.micro_batches)
    return (
        f"G_min: min_micro_batches={minimum} cuts the step into micro-batches of {mean:.1f} samples, each with the "
        "fixed cost of a whole one. Lower min_micro_batches, or put more samples into a step"
    )


def _dominating(request: PlanRequest, plan: IterationPlan) -> str | None:
    """The longest sample, if it fills the step and is not one of many like it."""
    m, shape, sample = max(
        (
            (m, shape, sample)
            for m in plan.micro_batches
            for shape, sample in zip(m.shapes, m.sample_ids, strict=True)
        ),
        key=lambda row: (prod(row[1]), row[2]),
    )
    alone = min(m.nanoseconds, request.cost.nanoseconds(1, pad([shape], m.sp_size), m.sp_size, m.recompute))
    mean = sum(row.sp_size * row.nanoseconds for row in plan.micro_batches) / plan.num_samples
    if alone < _MOST * plan.makespan or m.sp_size * alone < _OUTSTANDING * mean:
        return None
    return (
        f"one sample dominates: sample {sample} of {prod(shape)} tokens alone takes {alone / plan.makespan:.0%} of the "
        f"step on {m.sp_size} of {plan.world_size} ranks. Put more samples into a step, allow more ranks per sequence "
        "(sp_sizes), or cut such samples"
    )


def _memory(request: PlanRequest) -> str | None:
    bound = lower_bound(request)
    free = lower_bound(replace(request, limits=replace(request.limits, memory_bytes=_ANY_MEMORY)))
    if not bound or free > _MUCH * bound:
        return None
    return (
        f"memory: without the limit of {request.limits.memory_bytes / 1e9:.3g} GB the lower bound would be "
        f"{1 - free / bound:.0%} lower; now samples need wide groups, small micro-batches or recomputed layers. Raise "
        "memory_limit, or use more ranks or memory per rank"
    )


def _few(plan: IterationPlan) -> str | None:
    mean = sum(m.sp_size for m in plan.micro_batches) / plan.world_size
    if mean >= _FEW:
        return None
    return (
        f"too few samples in a step: {plan.num_samples} samples on {plan.world_size} ranks make {mean:.1f} "
        "micro-batches per rank, too few to even out. Put more samples into a step"
    )


def _planner(parts: _Parts) -> str:
    kinds = {"waiting": "ranks wait", "settings": "its micro-batches cost more than they have to"}
    return (
        f"the planner: {kinds[parts.largest]}, and neither the number of samples nor their lengths, padding, the "
        "memory or G_min explains it. Try planner='balanced'"
    )


def _most_micro_batches(plan: IterationPlan) -> int:
    counts = [0] * plan.world_size
    for m in plan.micro_batches:
        for rank in m.ranks:
            counts[rank] += 1
    return max(counts, default=0)
