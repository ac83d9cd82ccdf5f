"""``dcp-inter`` and ``dcp-intra``: throughput-optimal settings per length, balanced by accumulation (3.3, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.assembly import usable_sp_sizes
from lightning_dcp.planners.grouped.accumulation import micro_batches
from lightning_dcp.planners.grouped.base import Grouped, finish, nothing, padding
from lightning_dcp.planners.grouped.draw import draw
from lightning_dcp.planners.grouped.menu import Menus
from lightning_dcp.planners.options import check_flags
from lightning_dcp.planners.protocol import PlanRequest

MAX_STEP_FACTOR = 4.0
"""``G_max`` where the limits say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataCentric(Grouped):
    """The plan of both; they differ in the recomputed layers."""

    _policy: ClassVar[RecomputePolicy]

    full_batches: bool = False

    def __post_init__(self) -> None:
        Grouped.__post_init__(self)
        check_flags(self, "full_batches")

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Draw one optimizer step from the offered samples; the first of them is in it.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
            ValueError: world and profile have no size in common.
        """
        request = padding(request)
        sizes = usable_sp_sizes(request)
        if not len(request.sample_ids):
            return nothing(request)
        settled, groups = self._settled(request, self._policy, sizes)
        limits = request.limits
        accumulate = partial(
            micro_batches,
            world_size=request.world.world_size,
            max_step_factor=MAX_STEP_FACTOR if limits.max_step_factor is None else limits.max_step_factor,
            min_micro_batches=limits.min_micro_batches,
        )
        menus = Menus.build(settled, sizes, groups.sizes, groups.counts, groups.spared)
        placements = draw(
            settled, groups, menus, accumulate, last=self._is_last(request), shorten=not self.full_batches
        )
        return finish(request, settled, groups, placements, self.certify)


@dataclass(frozen=True, slots=True, kw_only=True)
class DCPInter(_DataCentric):
    """DCP-inter (paper 3.3): for each length group the ``(b, p)`` of most throughput (Eq. 1), all layers recomputed.

    Each step draws batches of one length group until their ``p`` add up to ``W``; each accumulates as many
    micro-batches ``g`` as leaves the least idle ratio (Eq. 3, each batch counted ``p`` times), searched exactly.

    - ``limits.min_micro_batches`` is ``G_min`` and ``limits.max_step_factor`` is ``G_max`` (Appendix C), 4 where it is
      ``None``.
    - ``limits.recompute`` wins where it is ``"none"`` or ``"full"``.
    - All layers recomputed hold one layer's input more than all but one. Samples that fit no group of ranks for that
      reason alone are grouped apart, and have the fewest recomputed layers that fit; the others keep all.
    - ``limits.packing`` is not used: samples are padded.

    Steps differ in their number of samples.

    Attributes:
        full_batches: keep the batches of most throughput however much time is idle, as the paper's text has it; the
            paper takes samples of each length to be without end. Otherwise shorter ones are tried where 3 % are idle.
            The other options are those of :class:`~lightning_dcp.planners.grouped.base.Grouped`.
    """

    _policy = "full"

    name: str = field(default="dcp-inter", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DCPIntra(_DataCentric):
    """DCP-intra (paper 3.4): :class:`DCPInter` with the fewest recomputed layers that fit the memory (Algorithm 1).

    Algorithm 1 as printed stops at the first ``r`` that fits, counts layers that are NOT recomputed with it and
    compares seconds; as its text means it, the least ``r`` within the memory (Eq. 6) is taken for each ``(b, p)``,
    and these are compared by throughput (Eq. 1).
    """

    _policy = "auto"

    name: str = field(default="dcp-intra", init=False)
