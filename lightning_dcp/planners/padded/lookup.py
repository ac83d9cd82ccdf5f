"""Times of single micro-batches for a search that asks one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.menus import Menu
from lightning_dcp.planners.padded.sources import Source

Column = tuple[list[int], list[int]]
"""Nanoseconds, rising, and the batch sizes that last so long."""


class Lookup:
    """What the samples from ``i`` on cost as a micro-batch.

    Between two tabled batch sizes the time is taken from the line through them. That is exact without recompute, and
    else by about a recomputed layer; it is not exact where a longer run has a larger shape, as with several axes.
    Whether a batch size fits is exact.

    Attributes:
        sp_sizes: ``p`` that may be used, ascending.
        kinds: column of the menus for each sample.
        ends: the samples from ``i`` up to ``ends[i] - 1`` may share a micro-batch.
        columns: what :meth:`column` has given so far, by ``p`` and kind.
    """

    def __init__(self, source: Source, menus: Sequence[Menu], kinds: IntArray, ends: IntArray) -> None:
        self.sp_sizes = tuple(menu.sp_size for menu in menus)
        self.kinds: list[int] = kinds.tolist()
        self.ends: list[int] = ends.tolist()
        self._batch_sizes: list[int] = menus[0].batch_sizes.tolist()
        self._times = {menu.sp_size: np.ascontiguousarray(menu.times.T) for menu in menus}
        self._counts = {menu.sp_size: (menu.times < NEVER).sum(axis=0).tolist() for menu in menus}
        self._menus = {menu.sp_size: menu for menu in menus}
        self._source = source
        self._largest: dict[int, dict[int, tuple[int, int]]] = {}
        self.columns: dict[int, list[Column | None]] = {p: [None] * len(c) for p, c in self._counts.items()}

    def column(self, sp_size: int, start: int) -> Column:
        """All that fits of the samples from ``start`` on, though there may be fewer of them."""
        kind = self.kinds[start]
        found = self.columns[sp_size][kind]
        if found is None:
            found = self.columns[sp_size][kind] = self._make(sp_size, kind)
        return found

    def _make(self, sp_size: int, kind: int) -> Column:
        count = self._counts[sp_size][kind]
        times, sizes = self._times[sp_size][kind, :count].tolist(), self._batch_sizes[:count]
        # All batch sizes up to 16 are rows.
        if count >= 16 and kind in self._largest_of(sp_size):
            batch_size, time = self._largest[sp_size][kind]
            times.append(time)
            sizes.append(batch_size)
        return times, sizes

    def _largest_of(self, sp_size: int) -> dict[int, tuple[int, int]]:
        if sp_size not in self._largest:
            self._largest[sp_size] = _largest(self._source, self._menus[sp_size])
        return self._largest[sp_size]

    def nanoseconds(self, sp_size: int, start: int, batch_size: int) -> int:
        """Time of one micro-batch; :data:`NEVER` where it does not fit or nobody knows."""
        times, sizes = self.column(sp_size, start)
        if not sizes or batch_size > sizes[-1]:
            return NEVER
        if batch_size <= 16 and batch_size <= len(sizes):
            # The first rows are 1, 2, 3, ...
            return times[batch_size - 1]
        row = bisect_right(sizes, batch_size) - 1
        low = sizes[row]
        if low == batch_size:
            return times[row]
        return times[row] + (times[row + 1] - times[row]) * (batch_size - low) // (sizes[row + 1] - low)


def _largest(source: Source, menu: Menu) -> dict[int, tuple[int, int]]:
    """The largest batch size that fits and its time, where it is none of the rows; by kind."""
    count = (menu.times < NEVER).sum(axis=0)
    sizes = menu.batch_sizes
    asked = np.arange(len(count)) < menu.asked
    last = menu.times[np.maximum(count - 1, 0), np.arange(len(count))]
    # The next row was asked for, so it does not fit.
    kinds = np.flatnonzero(asked & (count > 0) & (count < len(menu.times)) & (last <= menu.cap))
    low, high = sizes[count[kinds] - 1], sizes[count[kinds]]
    time = last[kinds]
    rows = low
    while True:
        wide = np.flatnonzero(high - low > 1)
        if not len(wide):
            break
        middle = (low[wide] + high[wide]) // 2
        found = source.times(menu.sp_size, middle, kinds[wide])
        fits = found < NEVER
        low, high, time = low.copy(), high.copy(), time.copy()
        low[wide[fits]], time[wide[fits]] = middle[fits], found[fits]
        high[wide[~fits]] = middle[~fits]
    more = np.flatnonzero(low > rows)
    return dict(zip(kinds[more].tolist(), zip(low[more].tolist(), time[more].tolist(), strict=True), strict=True))
