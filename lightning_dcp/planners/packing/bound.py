"""A lower bound on the makespan of a step of packed rows: no packed plan of the same cost model can be shorter.

A row of samples ``S`` on ``p`` ranks with ``r`` recomputed layers takes ``T = t0 + sum_S w_i`` on each. Let ``u_i`` be
what sample ``i`` uses of a resource of which a row has ``cap``; then ``sum_S u_i / cap <= 1``, so
``p T >= sum_S p (w_i + t0 u_i / cap)``: every sample carries its share of the fixed cost. ``c_i(D)`` is the least
share over all ``(p, r)`` in which the sample alone lasts at most ``D``; ``LB(D) = (1 / W) sum_i c_i(D)`` bounds
every plan of makespan ``D`` or less, so none is shorter than ``LB* = min{D : LB(D) <= D}``.

The resource may be chosen for each ``(p, r)``: tokens, bytes (at that ``r``), samples, or time, of which a row in a
plan of makespan ``D`` has ``D - t0``. All shares are integers, rounded down. That a rank has whole rows only makes the
bound tighter, see :mod:`~lightning_dcp.planners.packing.counting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.packing.counting import RowCount
from lightning_dcp.planners.packing.levels import LARGEST, Level, build_levels
from lightning_dcp.planners.packing.menu import Menu
from lightning_dcp.planners.protocol import PlanRequest

_ENOUGH = 20
"""The search for ``LB*`` ends within this binary digit of it (a part in a million)."""


def packed_lower_bound(request: PlanRequest) -> int:
    """``LB*`` in nanoseconds, rounded down: at most the makespan of every plan of packed rows of this request.

    It is at least ``max_i min_p T`` of single samples.

    Raises:
        InfeasibleError: a sample fits no setting.
        ValueError: the request cannot be packed.
    """
    return Bound.build(Menu.build(request)).least_makespan() if len(request.shapes) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The rank-time shares of all samples.

    Attributes:
        menu: samples, longest first.
        levels: prices at each ``(p, range of r)``.
    """

    menu: Menu
    levels: tuple[Level, ...]

    @classmethod
    def build(cls, menu: Menu) -> Bound:
        """Price all levels of all samples."""
        return cls(menu=menu, levels=build_levels(menu))

    def least_makespan(self) -> int:
        """The least makespan that neither the shares nor the number of rows exclude."""
        longest = int(self.menu.shortest_times.max())
        if self.menu.saturates:
            return longest
        return RowCount(self.menu, self.levels).least_makespan(self._least_shared(longest))

    def _least_shared(self, low: int) -> int:
        """``LB*``, at least ``low``: every step of the search proves that no plan lasts less than ``low``."""
        value = self.at(low)
        below = above = low, value
        high = value
        for step in count():
            if high - low <= low >> _ENOUGH:
                return low
            probe = high if step == 0 else low + (high - low) // 2 if step % 3 == 0 else _crossing(below, above)
            probe = min(max(probe, low), high)
            value = self.at(probe)
            # LB falls with D: a value below D bounds LB* from below, one above D proves that no plan lasts D.
            if value <= probe:
                above, low, high = (probe, value), max(low, value), probe
            else:
                below, low, high = (probe, value), probe + 1, min(high, value)
        raise AssertionError("the bracket shrinks in every third step")

    def at(self, makespan: int) -> int:
        """``LB(D)``: nanoseconds that every plan of at most ``D`` takes, with the best of several shares."""
        starts = [level.start(makespan) for level in self.levels]
        used = [
            (level, start, level.late_share(start, makespan))
            for level, start in zip(self.levels, starts, strict=True)
            if start < len(level.times)
        ]
        names = ("time", *sorted({name for level in self.levels for name in level.shares}))
        total = max(self._total(name, used) for name in names)
        return -(-total // self.menu.request.world.world_size)

    def _total(self, name: str, used: Sequence[tuple[Level, int, IntArray]]) -> int:
        """Sum over the samples of the least rank-time share, where each carries its part of one resource."""
        least = np.full(len(self.menu.lengths), LARGEST // len(self.menu.lengths), dtype=np.int64)
        for level, start, late in used:
            share = level.shares[name][start:] if name in level.shares else late
            np.minimum(least[start:], share, out=least[start:])
        return int(least.sum())

    def cheapest(self, makespan: int) -> IntArray:
        """Level of least rank-time for each sample in rows that are full in what runs out first, ``[n]``.

        Only levels in which the sample alone lasts at most ``makespan`` count; where there is none, the fastest.
        """
        chosen = self._least([level.start(makespan) for level in self.levels])
        late = np.flatnonzero(chosen < 0)
        if len(late):
            alone = [np.where(late >= k.fits, k.fixed + k.times[late], LARGEST) for k in self.levels]
            chosen[late] = np.argmin(alone, axis=0)
        return chosen

    def cheapest_from(self, narrowest: int, fullest: bool) -> IntArray:
        """Level of each sample on the first width from index ``narrowest`` on that it fits, else the last, ``[n]``.

        Args:
            narrowest: index of the width.
            fullest: the level with most recompute, which leaves most room in a row; else the cheapest.
        """
        fits = np.stack([width.alone < INFEASIBLE for width in self.menu.widths])
        wide = fits[narrowest:]
        width = np.where(
            wide.any(axis=0), narrowest + wide.argmax(axis=0), len(fits) - 1 - fits[::-1].argmax(axis=0)
        )
        return self._least([level.fits for level in self.levels], width, fullest)

    def _least(self, starts: Sequence[int], width: IntArray | None = None, last: bool = False) -> IntArray:
        least = np.full(len(self.menu.lengths), LARGEST, dtype=np.int64)
        chosen = np.full(len(least), -1, dtype=np.int64)
        for k, (level, start) in enumerate(zip(self.levels, starts, strict=True)):
            cost = level.full_share(start)
            better = (cost < least[start:]) | last
            if width is not None:
                better &= width[start:] == level.width
            chosen[start:][better], least[start:][better] = k, cost[better]
        return chosen


def _crossing(below: tuple[int, int], above: tuple[int, int]) -> int:
    """Where the line through two points ``(D, LB(D))`` meets ``LB(D) = D``, rounded up."""
    run, fall = above[0] - below[0], below[1] - above[1]
    return below[0] - (below[1] - below[0]) * run // -(run + fall) if run + fall else below[0]
