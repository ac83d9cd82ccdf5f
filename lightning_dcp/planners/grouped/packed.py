"""``packed``: sequences concatenated to a token budget, one ``p`` for all (the paper's other baseline)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.assembly import round_up, shortest
from lightning_dcp.planners.grouped.base import Drawing
from lightning_dcp.planners.grouped.groups import with_policy
from lightning_dcp.planners.grouped.rows import Rows, fill, fits_alone, largest_budget, least_budget
from lightning_dcp.planners.options import check_integers, check_policy
from lightning_dcp.planners.packing.bound import packed_lower_bound
from lightning_dcp.planners.packing.menu import packed_sp_sizes, row_tokens
from lightning_dcp.planners.protocol import InfeasibleError, PlanRequest

_TRIED_ROWS = 128
"""Rows that a setting is judged by; a wide world has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBaseline(Drawing):
    """Packed parallel: each group of ``p`` ranks runs rows of whole sequences, filled to a token budget by first fit.

    The rows are filled from the permutation in order; a sequence that finds no room waits for a later step. ``p`` and
    budget are those of most predicted tokens per second, the step's end included: for each ``p`` that holds the
    longest sample offered, the largest budget that the memory allows, then halves of it as long as they gain.

    - ``limits.packing`` must be set, and samples have one axis.
    - Ranks outside every group of ``p`` idle.
    - ``limits.min_micro_batches`` above ``rows`` is the number of rows; ``limits.max_step_factor`` is not used.

    Attributes:
        sp_size: ``p``; ``None`` chooses it.
        budget: tokens of a row; ``None`` chooses it. Never below the longest sample offered, nor above
            ``limits.max_tokens`` for each rank or what the memory holds.
        rows: rows of each group in a step.
        recompute: recomputed layers where ``limits.recompute`` is ``"auto"``; the paper's baselines recompute all.
            A sample that this keeps from fitting any size has a row of its own, with the fewest that fit.
            The other options are those of :class:`~lightning_dcp.planners.grouped.base.Drawing`.

    Raises:
        ValueError: an option is out of range.
    """

    sp_size: int | None = None
    budget: int | None = None
    rows: int = 1
    recompute: RecomputePolicy = "full"
    name: str = field(default="packed", init=False)

    def __post_init__(self) -> None:
        Drawing.__post_init__(self)
        check_policy(self.recompute)
        check_integers(self, 1, "rows", optional=("sp_size", "budget"))

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Draw one optimizer step from the offered samples; the first of them is in it.

        Raises:
            InfeasibleError: a sample does not fit ``sp_size``, or none of the sizes.
            ValueError: ``limits.packing`` is off, the samples have several axes or may not be padded, or ``sp_size``
                is no size of the world or of the profile.
        """
        if not request.limits.packing:
            raise ValueError(
                "packing=False: this planner packs sequences into rows; use packing=True, or a planner that pads, "
                "such as 'bucket'"
            )
        sizes = packed_sp_sizes(request)
        if self.sp_size is not None and self.sp_size not in sizes:
            raise ValueError(f"sp_size={self.sp_size} is not possible here; allowed are {sizes}")
        if not len(request.sample_ids):
            return IterationPlan(world_size=request.world.world_size, micro_batches=())
        rows = self._best(*self._fitting(request, sizes if self.sp_size is None else (self.sp_size,)))
        return _finish(request, rows, self.certify)

    def _fitting(self, request: PlanRequest, sp_sizes: tuple[int, ...]) -> tuple[PlanRequest, tuple[int, ...]]:
        """The request under the planner's recompute policy, and the sizes that hold the longest sample.

        Where it fits none with all layers recomputed, it gets a row of its own with the fewest (see :func:`fill`).
        """
        policies: list[RecomputePolicy] = [request.limits.recompute]
        if policies == ["auto"]:
            policies = [self.recompute, "auto"]
        for policy in policies:
            found = tuple(p for p in sp_sizes if _fits(with_policy(request, policy), p))
            if found:
                return with_policy(request, policies[0]), found
        longest, limits = int(np.argmax(request.shapes[:, 0])), request.limits
        raise InfeasibleError(
            f"sample {request.sample_ids[longest]} of {request.shapes[longest, 0]} tokens fits no row on groups of "
            f"{sp_sizes} ranks with {limits.memory_bytes} bytes and max_tokens={limits.max_tokens} for each rank. "
            "Allow more ranks per sequence (sp_sizes), raise the limits, or leave such samples out"
        )

    def _best(self, request: PlanRequest, sp_sizes: tuple[int, ...]) -> Rows:
        turns = max(self.rows, request.limits.min_micro_batches)
        sync = request.cost.profile.sync_time
        best: tuple[int, int, int, int] | None = None
        for p in sp_sizes:
            groups = len(request.world.blocks_of(p))
            tried = min(groups, max(_TRIED_ROWS // turns, 1))
            last: tuple[int, int] | None = None
            for budget in self._budgets(request, p):
                rows = fill(request, p, budget, tried * turns)
                rate = rows.tokens * groups, (rows.makespan(tried) + sync) * tried
                if last is not None and rate[0] * last[1] <= last[0] * rate[1]:
                    break
                last = rate
                if best is None or rate[0] * best[1] > best[0] * rate[1]:
                    best = (*rate, p, budget)
        assert best is not None
        _, _, p, budget = best
        return fill(request, p, budget, len(request.world.blocks_of(p)) * turns)

    def _budgets(self, request: PlanRequest, sp_size: int) -> Iterator[int]:
        least, most = least_budget(request, sp_size), largest_budget(request, sp_size)
        if self.budget is not None:
            yield min(max(self.budget // sp_size * sp_size, least), most)
            return
        while most > least:
            yield most
            most = most // (2 * sp_size) * sp_size
        yield least


def _fits(request: PlanRequest, sp_size: int) -> bool:
    """Whether the longest sample fits a row of its own."""
    if least_budget(request, sp_size) > row_tokens(request.limits, sp_size):
        return False
    return fits_alone(request, sp_size, int(request.shapes[:, 0].max()))


def _finish(request: PlanRequest, rows: Rows, certify: bool) -> IterationPlan:
    """The plan of filled rows; the bound holds for the policy of the request."""
    chosen = np.concatenate(rows.members)
    drawn = replace(request, sample_ids=request.sample_ids[chosen], shapes=request.shapes[chosen])
    blocks = request.world.blocks_of(rows.sp_size)
    p, found = rows.sp_size, rows.settings
    built = []
    for k, row in enumerate(rows.members):
        lengths = request.shapes[row, 0].tolist()
        built.append(
            MicroBatch(
                sample_ids=tuple(request.sample_ids[row].tolist()),
                shapes=tuple((length,) for length in lengths),
                padded_shape=(round_up(max(sum(lengths), shortest(p)), p),),
                packed=True,
                first_rank=blocks[k % len(blocks)][0],
                sp_size=p,
                recompute=tuple(found.recompute[k].tolist()),
                nanoseconds=int(found.nanoseconds[k]),
                bytes=int(found.bytes[k]),
            )
        )
    return IterationPlan(
        world_size=request.world.world_size,
        micro_batches=tuple(built),
        lower_bound=packed_lower_bound(drawn) if certify else 0,
    )
