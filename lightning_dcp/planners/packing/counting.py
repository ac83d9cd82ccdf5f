"""A second lower bound for packed rows: a rank cannot have part of a row.

The shares of :mod:`~lightning_dcp.planners.packing.bound` let a rank pay for 1.1 rows; it needs two. Let ``v_i(D)`` be
the least ``p w_i`` over all ``(p, r)`` in which the sample alone lasts at most ``D``: of the load of a rank with ``k``
rows, ``k t0`` at least is fixed, so it does at most ``D - k t0`` of the work ``V = sum_i v_i``. In each of its rows it
has at most ``cap`` of a resource (tokens per rank, samples), so with ``k`` rows at most ``k cap``.

Take any ``K``. If ``m`` ranks have up to ``K`` rows, they hold at most ``m K cap`` of the resource, so they do at most
``G(m K cap)`` of the work, with ``G(x)`` the most work that fits ``x`` (samples cut at will, most work per use first),
and at most ``m (D - t0)``. The others do at most ``(W - m) (D - (K + 1) t0)``. A plan of makespan ``D`` needs an ``m``
for which both together are at least ``V``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.levels import LARGEST, Level
from lightning_dcp.planners.packing.menu import Menu

_ENOUGH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Most:
    """``G``: the most work that fits an amount of one resource.

    Work per use is rounded up to ``2**-bits``; sorted by what is counted with, ``G`` is never too low.

    Attributes:
        capacity: of one row on each rank.
        bits: binary digits behind the point of :attr:`done` and :attr:`rate`.
        used: uses of the first samples together, most work per use first, ``[n + 1]``.
        done: their work, ``[n + 1]``.
        rate: work per use of each, and none at the end, ``[n + 1]``.
    """

    capacity: int
    bits: int
    used: IntArray
    done: IntArray
    rate: IntArray

    @classmethod
    def build(cls, work: IntArray, uses: IntArray, capacity: int) -> _Most:
        bits = min(max(61 - int(work.sum()).bit_length(), 0), 20)
        rate = -(-(work << bits) // uses)
        order = np.argsort(-rate, kind="stable")
        rate, uses = rate[order], uses[order]
        return cls(
            capacity=capacity,
            bits=bits,
            used=np.concatenate([[0], np.cumsum(uses)]),
            done=np.concatenate([[0], np.cumsum(rate * uses)]),
            rate=np.append(rate, 0),
        )

    def work(self, amount: IntArray) -> IntArray:
        """``G`` of these amounts, rounded up, nanoseconds."""
        amount = np.minimum(amount, self.used[-1])
        place = np.searchsorted(self.used, amount, side="right") - 1
        done = self.done[place] + self.rate[place] * (amount - self.used[place])
        return np.asarray(-(-done >> self.bits))

    def near(self, world_size: int) -> list[int]:
        """Numbers of rows of a rank that the bound is tried with: none, and those around the mean."""
        mean = int(self.used[-1]) // (world_size * self.capacity)
        return sorted({0, max(mean - 1, 0), mean, mean + 1})


@dataclass(slots=True)
class RowCount:
    """The bound for one request.

    Attributes:
        menu: samples, longest first.
        levels: prices at each ``(p, range of r)``.
    """

    menu: Menu
    levels: tuple[Level, ...]
    _starts: tuple[int, ...] = field(default=(), init=False)
    _work: int = field(default=0, init=False)
    _most: list[_Most] = field(default_factory=list, init=False)

    def least_makespan(self, low: int) -> int:
        """The least makespan from ``low`` on that this bound leaves room for, to a part in a million."""
        high, step = low, (low >> 8) + 1
        while not self.possible(high):
            low, high, step = high + 1, high + step, 2 * step
        while high - low > low >> _ENOUGH:
            middle = (low + high) // 2
            low, high = (low, middle) if self.possible(middle) else (middle + 1, high)
        return low

    def possible(self, makespan: int) -> bool:
        """Whether this bound leaves room for a plan of this makespan."""
        self._prepare(tuple(level.start(makespan) for level in self.levels))
        world_size = self.menu.request.world.world_size
        fixed = min(level.fixed for level in self.levels)
        few = np.arange(world_size + 1)
        for most in self._most:
            for rows in most.near(world_size):
                done = np.minimum(few * max(makespan - fixed, 0), most.work(few * (rows * most.capacity)))
                done = done + (world_size - few) * max(makespan - (rows + 1) * fixed, 0)
                if done.max() < self._work:
                    return False
        return True

    def _prepare(self, starts: tuple[int, ...]) -> None:
        """Work of each sample at levels that last short enough; it changes with the makespan only where these do."""
        if starts == self._starts:
            return
        count = len(self.menu.lengths)
        least = np.full(count, LARGEST // count, dtype=np.int64)
        for level, start in zip(self.levels, starts, strict=True):
            np.minimum(least[start:], level.sp_size * level.times[start:], out=least[start:])
        self._starts, self._work = starts, int(least.sum())
        self._most = [_Most.build(least, uses, capacity) for uses, capacity in self._resources()]

    def _resources(self) -> Iterator[tuple[IntArray, int]]:
        limits = self.menu.request.limits
        if limits.max_tokens is not None:
            yield self.menu.lengths, limits.max_tokens
        if limits.max_tokens is None or limits.max_batch_size is not None:
            yield 0 * self.menu.lengths + 1, limits.max_batch_size or len(self.menu.lengths)
