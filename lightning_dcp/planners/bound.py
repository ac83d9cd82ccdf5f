"""A lower bound on the makespan of a step: no plan of the same cost model can be shorter.

Let ``c_i(D)`` be the least ``p T(b, s_i, p, r) / b`` over all ``p, b, r`` with ``T <= D`` and ``M <= limit``: the
least rank-time that sample ``i`` takes in any plan of makespan ``D``. ``LB(D) = (1 / W) sum_i c_i(D)`` and
``LB* = min{D : LB(D) <= D}``. It holds for mixed lengths in one micro-batch too, as ``T`` and ``M`` never fall
with the length: ``b`` samples padded to ``s`` cost ``p T(b, s, p) >= sum_i p T(b, s_i, p) / b``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.assembly import check_feasible, padded_tokens, settings_within, usable_sp_sizes
from lightning_dcp.planners.protocol import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """For each sample the settings worth having, by rising least time; arrays ``[options, samples]``.

    Attributes:
        time: least nanoseconds ``T`` of the option.
        share: least rank-nanoseconds ``p T / b`` of the sample among the options up to this one.
    """

    time: IntArray
    share: IntArray

    def least(self, makespan: int) -> IntArray:
        """``c_i(D)`` of every sample, shape ``[n]``; :data:`INFEASIBLE` where no option lasts at most ``D``."""
        count = (self.time <= makespan).sum(axis=0)
        found = np.take_along_axis(self.share, np.maximum(count - 1, 0)[None], axis=0)[0]
        return np.where(count > 0, found, INFEASIBLE)


def shares(request: PlanRequest) -> Shares:
    """All options ``(p, b)`` of all samples, ready for :meth:`Shares.least`."""
    shapes = np.asarray(request.shapes, dtype=np.int64)
    times, values = [], []
    for p in usable_sp_sizes(request):
        tokens = padded_tokens(shapes, p)
        for low, high in _batch_ranges(request):
            found = settings_within(request, p, np.asarray(low), tokens).nanoseconds
            if (found >= INFEASIBLE).all():
                break
            limits = request.limits
            share = request.cost.least_share(p, (low, high), tokens, limits.memory_bytes, limits.recompute)
            times.append(found)
            values.append(np.where(found < INFEASIBLE, p * share, INFEASIBLE))
    time, share = np.stack(times), np.stack(values)
    order = np.argsort(time, axis=0, kind="stable")
    time, share = np.take_along_axis(time, order, 0), np.take_along_axis(share, order, 0)
    return Shares(time=time, share=np.minimum.accumulate(share, axis=0))


def _batch_ranges(request: PlanRequest) -> list[tuple[int, int]]:
    """Ranges that cover the batch sizes ``1 .. n``; the range of one number is exact."""
    limit = min(len(request.shapes), request.limits.max_batch_size or len(request.shapes))
    starts = request.cost.batch_sizes(limit)
    return [(low, high - 1) for low, high in zip(starts, (*starts[1:], limit + 1), strict=True)]


def lower_bound(request: PlanRequest, options: Shares | None = None) -> int:
    """``LB*`` in nanoseconds, rounded down: at most the makespan of every plan of this request.

    It is at least ``max_i min_p T(1, s_i, p)``.

    Args:
        request: samples, cost model, world and limits.
        options: :func:`shares` of the same request, if at hand.

    Raises:
        InfeasibleError: a sample fits no setting.
    """
    if not request.shapes:
        return 0
    check_feasible(request, usable_sp_sizes(request))
    table = options or shares(request)
    world_size = request.world.world_size
    # Any c_i(D) is finite from the longest of the shortest times on.
    low, high = int(table.time[0].max()), int(table.time[0].max())
    while not _holds(table, high, world_size):
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if _holds(table, middle, world_size):
            high = middle
        else:
            low = middle + 1
    return low


def _holds(table: Shares, makespan: int, world_size: int) -> bool:
    """``LB(D) <= D``. A sum of shares above ``2**62`` is no plan's, so it may saturate."""
    total = int(np.minimum(table.least(makespan), 2**52).sum())
    return total <= world_size * makespan
