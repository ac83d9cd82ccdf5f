"""Filling the ranks up to a target: wide groups first, longest samples first, where least room is left over."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dcp.planners.padded.lookup import Column, Lookup
from lightning_dcp.planners.padded.prices import Cuts
from lightning_dcp.topology import World

_FIRST = range(1, 17)
"""Batch sizes that are tabled without gaps."""


class Item(NamedTuple):
    """The ``batch_size`` samples from ``start`` on, in sorted order, on one group."""

    start: int
    batch_size: int
    first_rank: int
    sp_size: int
    nanoseconds: int


Ranges = dict[int, list[tuple[int, int]]]
"""For each ``p`` the samples ``a .. b - 1`` that run there, ``a`` rising."""


def ranges_of(cuts: Cuts) -> Ranges:
    """Where the micro-batches of the cheapest cut run."""
    found: Ranges = {}
    sp_sizes, sizes = cuts.sp_size.tolist(), cuts.batch_size.tolist()
    for start in cuts.chain():
        parts = found.setdefault(sp_sizes[start], [])
        end = start + sizes[start]
        if parts and parts[-1][1] == start:
            parts[-1] = parts[-1][0], end
        else:
            parts.append((start, end))
    return found


class Filled(NamedTuple):
    """What a pour came to.

    Attributes:
        items: the micro-batches placed, each the fields of an :class:`Item`.
        makespan: busy nanoseconds of the busiest rank.
        rest: rank-nanoseconds of the samples that found no room, at least; 0 if all are placed.
    """

    items: list[tuple[int, int, int, int, int]]
    makespan: int
    rest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pour:
    """Samples are poured into the ranks up to a target.

    Of the samples of one width, the longest that are left go first: as many of them as the cheapest cut takes at
    once, fewer where no group has room for so many, to the group with least room for them. So room is left over either
    for much or for next to nothing, and the short samples at the end fill what is left.

    Attributes:
        blocks: first ranks of the groups of each size.
        world_size: ``W``.
        lookup: times of micro-batches.
        sp_sizes: ``p`` of the cheapest micro-batch from each sample on.
        batch_sizes: its ``b``.
        least: rank-nanoseconds of the samples from each one on.
    """

    blocks: Mapping[int, Sequence[int]]
    world_size: int
    lookup: Lookup
    sp_sizes: Sequence[int]
    batch_sizes: Sequence[int]
    least: Sequence[int]

    @classmethod
    def build(cls, world: World, lookup: Lookup, cuts: Cuts) -> Pour:
        """Pour as the cuts say."""
        return cls(
            blocks={p: [first for first, _ in world.blocks_of(p)] for p in lookup.sp_sizes},
            world_size=world.world_size,
            lookup=lookup,
            sp_sizes=cuts.sp_size.tolist(),
            batch_sizes=cuts.batch_size.tolist(),
            least=cuts.least.tolist(),
        )

    def fill(self, ranges: Ranges, target: int) -> Filled:
        """Place the samples within the target, as far as there is room."""
        ranges = {p: list(parts) for p, parts in ranges.items()}
        while True:
            rooms, items = [target] * self.world_size, list[tuple[int, int, int, int, int]]()
            for p in sorted(ranges, reverse=True):
                if self._widen(ranges, p, max(rooms[first] for first in self.blocks[p])):
                    break
                stopped = self._fill_width(p, ranges[p], rooms, items)
                if stopped is not None:
                    return Filled(items, target, max(self.least[stopped], 1))
            else:
                return Filled(items, target - min(rooms), 0)

    def _widen(self, ranges: Ranges, sp_size: int, room: int) -> bool:
        """Move samples that no group of this width has room for to wider ones, where these are faster."""
        wider = [p for p in self.lookup.sp_sizes if p > sp_size]
        moved: list[tuple[int, int]] = []
        for k, (low, high) in enumerate(ranges[sp_size]):
            start = low
            while start < high and self.lookup.nanoseconds(sp_size, start, 1) > room:
                fast = [(p * t, p) for p in wider if (t := self.lookup.nanoseconds(p, start, 1)) <= room]
                if not fast:
                    break
                moved.append((min(fast)[1], start))
                start += 1
            ranges[sp_size][k] = start, high
        for p, start in moved:
            ranges.setdefault(p, []).append((start, start + 1))
            ranges[p].sort()
        return bool(moved)

    def _fill_width(
        self,
        sp_size: int,
        parts: list[tuple[int, int]],
        rooms: list[int],
        items: list[tuple[int, int, int, int, int]],
    ) -> int | None:
        """Place the samples of one width; the first that finds no room, if there is one."""
        kinds, ends, columns = self.lookup.kinds, self.lookup.ends, self.lookup.columns[sp_size]
        sp_sizes, batch_sizes = self.sp_sizes, self.batch_sizes
        # Wider groups hold each block of this size whole or not at all, so its ranks have equal room.
        free = sorted((rooms[first], first) for first in self.blocks[sp_size])
        for low, high in parts:
            i = low
            while i < high:
                most = min(batch_sizes[i] if sp_sizes[i] == sp_size else ends[i] - i, high - i)
                column = columns[kinds[i]] or self.lookup.column(sp_size, i)
                b, nanoseconds = fitting(column, most, free[-1][0])
                if not b:
                    return i
                room, first = free.pop(bisect_left(free, (nanoseconds,)))
                items.append((i, b, first, sp_size, nanoseconds))
                insort(free, (room - nanoseconds, first))
                i += b
        for room, first in free:
            rooms[first : first + sp_size] = [room] * sp_size
        return None


def fitting(column: Column, most: int, room: int) -> tuple[int, int]:
    """The largest batch size up to ``most`` that lasts no longer than ``room``, and its nanoseconds; 0 if none."""
    times, sizes = column
    # The first rows are 1, 2, 3, ...
    if most <= len(_FIRST) and most <= len(times) and times[most - 1] <= room:
        return most, times[most - 1]
    row = bisect_right(times, room)
    if not row:
        return 0, 0
    if sizes[row - 1] >= most:
        row = bisect_right(sizes, most)
    low, time = sizes[row - 1], times[row - 1]
    if row == len(sizes) or sizes[row] == low + 1 or low == most:
        return low, time
    width, slope = sizes[row] - low, times[row] - time
    # The most whose share of the slope, rounded down, still fits.
    more = min(most - low, width - 1, ((room - time + 1) * width - 1) // slope if slope else width)
    return low + more, time + slope * more // width
