"""``bucket``: one ``p`` for all lengths, batch sizes lowered until the times match (the paper's baseline)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lightning_dcp.cost import INFEASIBLE, RecomputePolicy
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.assembly import exceeds, round_up, usable_sp_sizes
from lightning_dcp.planners.grouped.accumulation import equal
from lightning_dcp.planners.grouped.base import Grouped, finish, nothing, padding
from lightning_dcp.planners.grouped.draw import draw
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import Curve, Menus
from lightning_dcp.planners.grouped.tuning import best_buckets
from lightning_dcp.planners.options import check_integers, check_policy
from lightning_dcp.planners.protocol import InfeasibleError, PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(Grouped):
    """Bucket parallel (paper, Figure 2): every batch on groups of one size, one batch for each group and step.

    The batch size of a length group is the largest that lasts no longer than a target, from that of the slowest
    single sample upwards. ``p`` and target are those of most predicted throughput over the offered samples, so the
    baseline is as good as its settings can make it.

    - Ranks outside every group of ``p`` idle.
    - Where ``limits.min_micro_batches`` is above 1, each batch accumulates so many micro-batches;
      ``limits.max_step_factor`` is not used.
    - ``limits.packing`` is not used: samples are padded.

    Attributes:
        sp_size: ``p``; ``None`` chooses it. It must fit the longest sample offered and, where ``edges`` are given,
            the longest edge, if any size does: then no later step needs another.
        recompute: recomputed layers where ``limits.recompute`` is ``"auto"``; the paper's baseline recomputes all.
            Samples that this keeps from fitting are grouped apart, and have the fewest that fit.
            The other options are those of :class:`~lightning_dcp.planners.grouped.base.Grouped`.

    Raises:
        ValueError: an option is out of range.
    """

    sp_size: int | None = None
    recompute: RecomputePolicy = "full"
    name: str = field(default="bucket", init=False)

    def __post_init__(self) -> None:
        Grouped.__post_init__(self)
        check_policy(self.recompute)
        check_integers(self, 1, optional=("sp_size",))

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Draw one optimizer step from the offered samples; the first of them is in it.

        Raises:
            InfeasibleError: a sample does not fit ``sp_size``, or no one size fits all samples.
            ValueError: ``sp_size`` is no size of the world or of the profile, or they have none in common.
        """
        request = padding(request)
        sizes = usable_sp_sizes(request)
        if self.sp_size is not None and self.sp_size not in sizes:
            raise ValueError(f"sp_size={self.sp_size} is not possible here; allowed are {sizes}")
        if not len(request.sample_ids):
            return nothing(request)
        allowed = sizes if self.sp_size is None else (self.sp_size,)
        settled, groups = self._settled(request, self.recompute, allowed)
        last = self._is_last(request)
        found = best_buckets(settled, groups, self._fitting(request, settled, groups, allowed), last)
        curve = Curve.build(settled, found.sp_size, groups.sizes, groups.counts, groups.spared)
        menus = Menus(best=found.settings(), curves=[curve])
        accumulate = partial(equal, number=max(request.limits.min_micro_batches, 1))
        placements = draw(settled, groups, menus, accumulate, last=last)
        return finish(request, settled, groups, placements, self.certify)

    def _fitting(
        self, request: PlanRequest, settled: PlanRequest, groups: Groups, sp_sizes: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Sizes to choose from: those that fit every sample and, if any does, the longest edge.

        An edge that fits none under the planner's policy may, as a sample may, with the fewest recomputed layers.
        """
        fitting = tuple(p for p in sp_sizes if groups.fits(settled, p).all())
        if not fitting:
            raise InfeasibleError(
                f"bucket runs all samples on groups of one size, and none of {sp_sizes} fits all of the "
                f"{len(request.sample_ids)} samples offered; use another planner, or raise the limits"
            )
        by_policy = (tuple(p for p in fitting if self._fits_edges(asked, p)) for asked in (settled, request))
        return next(filter(None, by_policy), fitting)

    def _fits_edges(self, request: PlanRequest, sp_size: int) -> bool:
        """Whether a sample of the longest edge's tokens would fit."""
        limits, tokens = request.limits, np.asarray(round_up(max(self.edges or (1,)), sp_size))
        found = request.cost.settings(sp_size, np.asarray(1), tokens, limits.memory_bytes, limits.recompute)
        return bool(found.nanoseconds < INFEASIBLE) and not exceeds(limits, sp_size, np.asarray(1), tokens).any()
