"""What micro-batches of each batch size and sequence-parallel size cost, as far as a plan may want to know.

A table of all shapes, batch sizes and sequence-parallel sizes would cost more than the rest of planning. So times are
asked for until they pass a makespan that no plan needs, and for wide groups only where their rank-time for a sample
may be below that of narrower ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.padded.least import NEVER, Shares
from lightning_dcp.planners.padded.sources import Source
from lightning_dcp.planners.protocol import PlanRequest

_COARSE = (4, 16, 64, 256, 1024)
"""Batch sizes that tell about how long a step must be."""
_AT_ONCE = 4096
"""Times that are asked for in one call, at least a row."""


def batch_sizes(request: PlanRequest, limit: int) -> IntArray:
    """All up to 16, then eight per octave, the measured ones and ``limit`` itself; ascending, none above it."""
    spaced = {(8 + k) << octave for octave in range(1, 28) for k in range(8)}
    found = {*range(1, 17), *spaced, *request.cost.batch_sizes(limit), limit}
    return np.asarray(sorted(b for b in found if b <= limit), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """Micro-batches on groups of one size.

    Attributes:
        sp_size: ``p``.
        batch_sizes: ``b`` of the rows, ascending from 1, shape ``[K]``.
        times: nanoseconds of ``b`` samples of each kind, shape ``[K, U]``; :data:`NEVER` where they do not fit, or
            where nobody asked.
        most: the largest batch size that limits other than memory allow, shape ``[U]``.
        asked: the first so many kinds were asked for more than one sample.
        cap: of these, all was asked for that ends within so many nanoseconds.
        plain: nanoseconds of the same without recompute and whatever the memory, shape ``[K, U]``.
        slack: what rounding may take from ``plain``.
    """

    sp_size: int
    batch_sizes: IntArray
    times: IntArray
    plain: IntArray
    most: IntArray
    asked: int
    cap: int
    slack: int

    def floors(self, batch_sizes: IntArray, columns: slice) -> IntArray:
        """At most the nanoseconds of batch sizes ``[R]`` of some of the kinds, shape ``[R, n]``.

        Recompute costs no less with more samples, and without it the time is a line between two rows. Batch sizes
        behind the last row count as that row's.
        """
        row = np.searchsorted(self.batch_sizes[: len(self.times)], batch_sizes, side="right") - 1
        after = np.minimum(row + 1, len(self.times) - 1)
        low, plain = self.batch_sizes[row], self.plain[:, columns]
        more, width = batch_sizes - low, np.maximum(self.batch_sizes[after] - low, 1)
        grown = (plain[after] - plain[row]) // width[:, None] * more[:, None] - self.slack
        return np.asarray(self.times[row, columns] + np.where(more[:, None] > 0, np.maximum(grown, 0), 0))

    def shares(self) -> IntArray:
        """At most the rank-time for a sample of any batch size from a row to the next, shape ``[K, U]``."""
        sizes = self.batch_sizes[: len(self.times)]
        last = np.append(sizes[1:] - 1, self.last)
        found = self.sp_size * self.times // sizes[:, None]
        gaps = np.flatnonzero(last > sizes)
        at_last = self.sp_size * self.floors(last[gaps], slice(None)) // last[gaps, None]
        found[gaps] = np.minimum(found[gaps], at_last)
        return np.asarray(np.where(self.times < NEVER, found, NEVER))

    def last_within(self, makespan: int | IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The last batch size behind the last row that ends within the makespan, or each kind's, whatever the memory.

        Returns:
            For each kind that row, the batch size, and at most its rank-nanoseconds, :data:`NEVER` where there is no
            such batch size or nobody asked; each of shape ``[U]``.
        """
        kinds = np.arange(self.times.shape[1])
        row = np.maximum((self.times <= makespan).sum(axis=0) - 1, 0)
        after = np.minimum(row + 1, len(self.times) - 1)
        low, width = self.batch_sizes[row], self.batch_sizes[after] - self.batch_sizes[row]
        grown = (self.plain[after, kinds] - self.plain[row, kinds]) // np.maximum(width, 1)
        room = makespan - self.times[row, kinds] + self.slack
        more = np.minimum(np.minimum(width - 1, self.most - low), room // np.maximum(grown, 1))
        usable = (more > 0) & (kinds < self.asked) & (self.times[row, kinds] <= makespan)
        time = self.times[row, kinds] + np.maximum(grown * more - self.slack, 0)
        more = np.where(usable, more, 0)
        return row, low + more, np.where(usable, self.sp_size * np.minimum(time, NEVER), NEVER)

    @property
    def last(self) -> int:
        """The largest batch size below that of the row that would come next."""
        count = len(self.times)
        return int(self.batch_sizes[count] - 1 if count < len(self.batch_sizes) else self.batch_sizes[-1])


def shares_of(menus: Sequence[Menu], counts: IntArray) -> Shares:
    """All ways to run samples that the menus have; ``counts`` as in :class:`Shares`."""
    return Shares(
        times=np.concatenate([menu.times for menu in menus]),
        shares=np.concatenate([menu.shares() for menu in menus]),
        counts=counts,
    )


Singles = Mapping[int, tuple[IntArray, IntArray]]
"""For each ``p``, ascending, nanoseconds of single samples, and those without recompute; each ``[1, U]``."""


def singles_of(source: Source, sp_sizes: Sequence[int]) -> Singles:
    """Every kind alone on every size; :data:`NEVER` where it does not fit."""
    one = np.ones(1, dtype=np.int64)
    return {p: _clipped(p, *source.rows(p, one, slice(None))) for p in sp_sizes}


def build(request: PlanRequest, source: Source, singles: Singles, margin: int) -> list[Menu]:
    """The menu of each size, ascending; every kind must fit at least one of them alone.

    Args:
        request: what is planned.
        source: where the times come from.
        singles: :func:`singles_of` this source.
        margin: wide groups are asked for whose rank-time for a sample may be below that of narrower ones, or above it
            by less than so many percent.
    """
    return _Builder(request, source).menus(singles, margin)


def again(request: PlanRequest, source: Source, menus: Sequence[Menu]) -> list[Menu]:
    """The same menus with the times of another source of the same kinds."""
    return [_Builder(request, source).same(menu) for menu in menus]


def unasked(source: Source, menus: Sequence[Menu], makespan: int) -> IntArray:
    """At most the rank-time for a sample in batches that were not asked for, shape ``[U]``; else :data:`NEVER`."""
    least = np.full(len(source.counts), NEVER, dtype=np.int64)
    for menu in menus:
        floor = menu.sp_size * source.least_share(menu.sp_size, makespan)
        floor[: menu.asked] = NEVER
        least = np.minimum(least, floor)
    return least


class _Builder:
    """Asks for rows of the menus as long as they may matter.

    Attributes:
        batch_sizes: all that may become rows.
        slack: what rounding takes at most from a time: a nanosecond for each layer and the constant, twice.
    """

    def __init__(self, request: PlanRequest, source: Source) -> None:
        self._source = source
        self._world_size = request.world.world_size
        count = len(request.shapes)
        self.batch_sizes = batch_sizes(request, min(count, request.limits.max_batch_size or count))
        self.slack = 2 * sum(request.cost.num_layers) + 2

    def menus(self, singles: Singles, margin: int) -> list[Menu]:
        """Narrow groups first: what they cost tells where wider ones are of no use."""
        counts = self._source.counts
        bound = self._bound(tuple(singles), [times[0] for times, _ in singles.values()])
        least = np.stack([p * self._source.least_share(p, bound) for p in singles])
        total = int((np.minimum(least.min(axis=0), 2**62 // int(counts.sum())) * counts).sum())
        fastest = int(np.concatenate([times for times, _ in singles.values()]).min(axis=0).max())
        shortest = max(fastest, total // self._world_size)
        found, best = [], np.full(len(counts), NEVER, dtype=np.int64)
        for (p, single), floor in zip(singles.items(), least, strict=True):
            wanted = np.flatnonzero(floor < best * (100 + margin) // 100)
            menu = self._menu(p, single, wanted, bound + bound // 4)
            found.append(menu)
            shares = p * menu.times // menu.batch_sizes[: len(menu.times), None]
            best = np.minimum(best, np.where(menu.times <= shortest, shares, NEVER).min(axis=0))
        return found

    def same(self, menu: Menu) -> Menu:
        """A menu of the same kinds up to the same time; itself if only the times of single samples may differ."""
        single = self._rows(menu.sp_size, self.batch_sizes[:1], slice(None))
        differs = np.flatnonzero(single[0][0] != menu.times[0])
        if int(differs.min(initial=menu.asked)) < menu.asked:
            return self._menu(menu.sp_size, single, np.arange(menu.asked), menu.cap)
        return replace(menu, times=np.concatenate([single[0], menu.times[1:]])) if len(differs) else menu

    def _rows(self, sp_size: int, batch_sizes: IntArray, columns: slice) -> tuple[IntArray, IntArray]:
        return _clipped(sp_size, *self._source.rows(sp_size, batch_sizes, columns))

    def _bound(self, sp_sizes: Sequence[int], singles: Sequence[IntArray]) -> int:
        """At least the lower bound of the step: that of a few batch sizes."""
        few = np.intersect1d(self.batch_sizes, _COARSE)
        narrow, _ = self._rows(sp_sizes[0], few, slice(None))
        alone = np.stack(singles)
        shares = [np.asarray(sp_sizes)[:, None] * alone, sp_sizes[0] * narrow // few[:, None]]
        options = Shares(
            times=np.concatenate([alone, narrow]), shares=np.concatenate(shares), counts=self._source.counts
        )
        return options.makespan(self._world_size)

    def _menu(self, sp_size: int, single: tuple[IntArray, IntArray], wanted: IntArray, cap: int) -> Menu:
        """Rows for the kinds up to the last wanted one, as long as some end in time.

        Longer ones are asked for too: so if a kind is not asked for, the shorter ones, with which it may share a
        micro-batch, are not either.
        """
        times, plain = [single[0]], [single[1]]
        start, stop = 0, int(wanted.max(initial=-1)) + 1
        row, width = 1, single[0].shape[1]
        while row < len(self.batch_sizes):
            in_time = np.flatnonzero(times[-1][-1, start:stop] <= cap)
            if not len(in_time):
                break
            start, stop = start + int(in_time[0]), start + int(in_time[-1]) + 1
            # As many rows at once as are worth the call, though fewer shapes need the later ones.
            few = self.batch_sizes[row : row + 1 + _AT_ONCE // (stop - start)]
            for table, found in zip((times, plain), self._rows(sp_size, few, slice(start, stop)), strict=True):
                table.append(np.full((len(few), width), NEVER, dtype=np.int64))
                table[-1][:, start:stop] = found
            row += len(few)
        rows = _needed(np.concatenate(times), cap)
        return Menu(
            sp_size=sp_size,
            batch_sizes=self.batch_sizes,
            times=np.concatenate(times)[:rows],
            plain=np.concatenate(plain)[:rows],
            most=self._source.most(sp_size),
            asked=int(wanted.max(initial=-1)) + 1,
            cap=cap,
            slack=self.slack,
        )


def _clipped(sp_size: int, times: IntArray, plain: IntArray) -> tuple[IntArray, IntArray]:
    """:data:`NEVER` also where the rank-time would pass it: nothing possible may cost as much as what is not."""
    most = NEVER // sp_size
    return np.where(times < most, times, NEVER), np.where(plain < most, plain, NEVER)


def _needed(times: IntArray, cap: int) -> int:
    """Rows up to the one behind the last that ends in time anywhere."""
    return min(int(np.flatnonzero((times <= cap).any(axis=1)).max(initial=0)) + 2, len(times))
