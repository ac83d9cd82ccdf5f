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
from lightning_dcp.planners.assembly import check_feasible, exceeds, may_share, round_up_all, usable_sp_sizes
from lightning_dcp.planners.protocol import PlanRequest

_ROWS = 4
"""Batch sizes asked for at once: large enough for array speed, small enough to stop early where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """For each sample the settings worth having.

    Attributes:
        batch_sizes: ``b`` of the rows of ``alone``, ascending from 1, shape ``[K]``.
        alone: for each ``p`` the nanoseconds of ``b`` samples of the sample's own size, shape ``[K, n]``;
            :data:`INFEASIBLE` where it does not fit.
        time: least nanoseconds ``T`` of the options ``(p, range of b)``, rising, shape ``[options, n]``.
        share: least rank-nanoseconds ``p T / b`` of the sample among the options up to this one.
    """

    batch_sizes: IntArray
    alone: dict[int, IntArray]
    time: IntArray
    share: IntArray

    @classmethod
    def build(cls, request: PlanRequest) -> Shares:
        """Ask the cost model for all options of all samples, in the order of the request."""
        limit = min(len(request.shapes), request.limits.max_batch_size or len(request.shapes))
        low = np.asarray(request.cost.batch_sizes(limit), dtype=np.int64)
        high = np.append(low[1:] - 1, limit)
        alone, values = {}, []
        for p in usable_sp_sizes(request):
            alone[p], share = _options(request, p, low, high)
            values.append(np.where(alone[p] < INFEASIBLE, p * share, INFEASIBLE))
        time, share = np.concatenate(list(alone.values())), np.concatenate(values)
        order = np.argsort(time, axis=0, kind="stable")
        time, share = np.take_along_axis(time, order, 0), np.take_along_axis(share, order, 0)
        return cls(batch_sizes=low, alone=alone, time=time, share=np.minimum.accumulate(share, axis=0))

    def least(self, makespan: int) -> IntArray:
        """``c_i(D)`` of every sample, shape ``[n]``; :data:`INFEASIBLE` where no option lasts at most ``D``."""
        count = (self.time <= makespan).sum(axis=0)
        found = np.take_along_axis(self.share, np.maximum(count - 1, 0)[None], axis=0)[0]
        return np.where(count > 0, found, INFEASIBLE)


def _options(request: PlanRequest, sp_size: int, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Nanoseconds and nanoseconds per sample, both ``[K, n]``, of ``b`` from ``low[k]`` to ``high[k]``."""
    shapes = request.shapes
    tokens = round_up_all(shapes, sp_size)
    time = np.full((len(low), len(tokens)), INFEASIBLE, dtype=np.int64)
    share = np.zeros_like(time)
    limits = request.limits
    active = np.flatnonzero(may_share(limits, sp_size, shapes))
    for start in range(0, len(low), _ROWS):
        if not len(active):
            break
        rows = slice(start, start + _ROWS)
        ends = low[rows, None], high[rows, None]
        first, each = request.cost.least_share(
            sp_size, ends, tokens[active], limits.memory_bytes, limits.recompute
        )
        first = np.where(exceeds(limits, sp_size, low[rows, None], tokens[active]), INFEASIBLE, first)
        time[rows, active], share[rows, active] = first, each
        # What does not fit with b samples does not fit with more.
        active = active[first[-1] < INFEASIBLE]
    return time, share


def lower_bound(request: PlanRequest, options: Shares | None = None) -> int:
    """``LB*`` in nanoseconds, rounded down: at most the makespan of every plan of this request.

    It is at least ``max_i min_p T(1, s_i, p)``.

    Args:
        request: samples, cost model, world and limits.
        options: the shares of the same request, if at hand.

    Raises:
        InfeasibleError: a sample fits no setting.
    """
    if not len(request.shapes):
        return 0
    check_feasible(request, usable_sp_sizes(request))
    table = options or Shares.build(request)
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
