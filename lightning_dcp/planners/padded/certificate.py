"""A lower bound on the makespan that knows of padding: prices of the samples that no micro-batch is below.

**Claim.** Let the samples be sorted by falling length, ``s_0 >= s_1 >= ...``, let ``D`` be a makespan, and let
``price_i`` be such that ``price_i + ... + price_(i+b-1) <= p T(b, s_i, p)`` for every ``i``, ``b``, ``p`` whose
micro-batch fits and ends within ``D``. Then no plan is shorter than ``min(D, sum of all prices / W)``.

**Proof.** Take a plan that ends within ``D``; its micro-batches ``j`` have ``b_j`` samples, the longest of length
``M_j``, on ``p_j`` ranks, with any mix of ``p`` and of lengths. Number them by falling ``M_j``, whatever their ``p``,
and hand out the sorted samples anew, the first ``b_1`` to the first and so on. When ``j`` is served, at least all
samples longer than ``M_j`` are handed out, for these sat in ``1 .. j - 1``. So its first sample ``s_i`` is no longer
than ``M_j``, and as ``T`` and the memory never fall with the length, a micro-batch of ``b_j`` samples from ``i`` on
fits, ends within ``D``, and takes no more than the ``p_j T_j`` that the plan spends. The prices of its samples are at
most that, so all prices together are at most ``sum_j p_j T_j``, which is at most ``W`` times the makespan.

Several axes: let the length be the number of tokens, and let ``T(b, s_i, p)`` count with the fewest padded tokens
among all samples that are no shorter than ``s_i``. The longest of ``j`` is one of those when ``j`` is served, and a
micro-batch is padded to no less than any of its samples. With ``exact_shapes`` a micro-batch holds one shape, so the
claim is used for each shape by itself.

Prices come from the dynamic program of :mod:`~lightning_dcp.planners.padded.prices` (the differences of its values,
which meet the conditions with equality where it cuts). On groups of some sizes the menus lack batches of the shorter
samples; these would take at least some share of rank-time for each of their samples, and no price is above it. What
else the program left out, untabled batch sizes and the joints between its parts, is checked here, and prices that are
too high are lowered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.menus import Menu, unasked
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.padded.sources import Alone

_ONE = 2**20
_AT_ONCE = 2**14
"""Conditions that are looked at in one go, at least those of one batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is known about the micro-batches that a plan of these samples may have.

    Attributes:
        samples: the step's samples.
        alone: their costs, no dearer than in any plan.
        menus: the menus of these costs.
    """

    samples: Samples
    alone: Alone
    menus: Sequence[Menu]

    def bound(self, least: IntArray, makespan: int, world_size: int) -> int:
        """The claim of this module, in nanoseconds, rounded up.

        Args:
            least: sums of prices from each sample on, shape ``[n + 1]``; they need not meet the conditions.
            makespan: ``D``.
            world_size: ``W``.
        """
        makespan = min([makespan, *(menu.cap for menu in self.menus)])
        count = len(least) - 1
        factor = np.full(count, _ONE, dtype=np.int64)
        reach = np.zeros(count, dtype=np.int64)
        longest = max(menu.last for menu in self.menus)
        sums = np.append(least, np.zeros(longest, dtype=np.int64))
        for first, sizes, most in self._conditions(makespan):
            start = np.arange(first, first + most.shape[1])
            end = start + sizes[:, None]
            prices = sums[start] - sums[end]
            row, column = np.nonzero((prices > most) & (end <= self.samples.ends[start]))
            # A quotient of floats is the same on every machine; two units cover its rounding.
            found = np.floor(most[row, column] / prices[row, column] * _ONE).astype(np.int64) - 2
            np.minimum.at(factor, start[column], np.maximum(found, 0))
            np.maximum.at(reach, start[column], sizes[row])
        lowered = factor.copy()
        for i in np.flatnonzero(reach).tolist():
            run = slice(i, i + int(reach[i]))
            lowered[run] = np.minimum(lowered[run], factor[i])
        price = least[:-1] - least[1:]
        # A negative price stays: it only makes the sums of its runs smaller.
        price = np.where(price > 0, price // _ONE * lowered + price % _ONE * lowered // _ONE, price)
        return max(min(makespan, -(-int(price.sum()) // world_size)), 0)

    def _conditions(self, makespan: int) -> Iterator[tuple[int, IntArray, IntArray]]:
        """First samples of runs, their lengths, and the most that their prices may add up to.

        Yields:
            The first ``i``, batch sizes ``[R]``, and rank-nanoseconds of runs from ``i``, ``i + 1``, ... on,
            ``[R, m]``.
        """
        unit = self.samples.unit
        for menu in self.menus:
            next_size = 1
            while next_size <= menu.last:
                row = int(np.searchsorted(menu.batch_sizes[: len(menu.times)], next_size, side="right")) - 1
                used = np.flatnonzero((menu.times[row] <= makespan)[unit])
                if not len(used):
                    break
                first, stop = int(used[0]), int(used[-1]) + 1
                sizes = np.arange(next_size, min(next_size + 1 + _AT_ONCE // (stop - first), menu.last + 1))
                floors = menu.floors(sizes, slice(unit[first], unit[stop - 1] + 1))[
                    :, unit[first:stop] - unit[first]
                ]
                yield first, sizes, np.where(floors <= makespan, menu.sp_size * floors, NEVER * 2**10)
                next_size = int(sizes[-1]) + 1
        yield 0, np.ones(1, dtype=np.int64), unasked(self.alone, self.menus, makespan)[None, unit]
