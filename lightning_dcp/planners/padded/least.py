"""The least makespan at which the least rank-times of all samples add up to no more than the ranks have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray

NEVER = 2**50
"""Nanoseconds that stand for "does not fit"; thousands of them still add up without wrapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Ways to run samples: how long each lasts and the rank-time that it takes for one sample.

    Attributes:
        times: nanoseconds of each option, shape ``[options, U]``; at least :data:`NEVER` where there is none.
        shares: rank-nanoseconds for each sample, shape ``[options, U]``.
        counts: samples of each of the ``U`` shapes.
    """

    times: IntArray
    shares: IntArray
    counts: IntArray

    def least(self, makespan: int) -> IntArray:
        """``c(D)`` of every shape, shape ``[U]``; at least :data:`NEVER` where no option lasts at most ``D``."""
        return np.asarray(np.where(self.times <= makespan, self.shares, NEVER).min(axis=0))

    def part(self, chosen: IntArray) -> Shares:
        """The options of some of the shapes."""
        return Shares(times=self.times[:, chosen], shares=self.shares[:, chosen], counts=self.counts[chosen])

    def makespan(self, world_size: int) -> int:
        """``min{D : sum of c(D) <= W D}``, at least the time of every shape's fastest option."""
        low = int(self.times.min(axis=0).max())
        high = self._within(low, world_size)
        if high <= low:
            return low
        # The sum falls with D, so what it is at one end bounds the other.
        low = max(low, self._within(high, world_size) - 1)
        return self._between(low, max(low + 1, min(high, self._within(low, world_size))), world_size)

    def _within(self, makespan: int, world_size: int) -> int:
        """The least time in which the ranks have as much as the shapes need for this makespan."""
        return -(-_total(self.least(makespan), self.counts) // world_size)

    def _between(self, low: int, high: int, world_size: int) -> int:
        """Bisection for ``low < D <= high``; shapes whose ``c`` is the same at both ends are only added up."""
        table, fixed = self, 0
        at_low, at_high = self.least(low), self.least(high)
        while high - low > 1:
            changing = at_low != at_high
            fixed += _total(at_low[~changing], table.counts[~changing])
            if not changing.any():
                return max(low + 1, -(-fixed // world_size))
            table, at_low, at_high = table.part(changing), at_low[changing], at_high[changing]
            middle = (low + high) // 2
            found = table.least(middle)
            if fixed + _total(found, table.counts) <= world_size * middle:
                high, at_high = middle, found
            else:
                low, at_low = middle, found
        return high


def _total(shares: IntArray, counts: IntArray) -> int:
    """Sum over all samples; rank-times that are no plan's are clipped, so that it cannot wrap."""
    most = 2**62 // max(int(counts.sum()), 1)
    return int((np.minimum(shares, most) * counts).sum())
