"""Local search on the busiest rank, bounded by a number of moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.lookup import Lookup
from lightning_dcp.planners.padded.pour import Item
from lightning_dcp.planners.padded.schedule import Schedule
from lightning_dcp.topology import Block, World

_LOOKED_AT = 12
_TARGETS = 3


class Move(NamedTuple):
    """Items to take away and items to place; ``value`` is the load of the busiest rank touched, afterwards."""

    value: int
    removed: tuple[Item, ...]
    added: tuple[Item, ...]


class Improver:
    """Moves micro-batches, or parts of them, away from the busiest rank.

    - A micro-batch, or the first or last of its samples, goes to a group of the same width that is least busy, or is
      exchanged for a shorter one there.
    - Its first or last samples go to the micro-batch of their neighbours in length, wherever that runs; all of them
      if the two become one.
    - It goes to a group of another width.

    Recomputed layers follow from each micro-batch: smaller ones need fewer.

    Attributes:
        schedule: what is improved, in place.
        world: its groups.
        lookup: times of micro-batches.
    """

    def __init__(self, schedule: Schedule, world: World, lookup: Lookup) -> None:
        self.schedule = schedule
        self.world = world
        self.lookup = lookup
        self._blocks = {p: np.asarray([first for first, _ in world.blocks_of(p)]) for p in lookup.sp_sizes}

    def improve(self, max_moves: int, bound: int) -> int:
        """Make the best move again and again until none helps, or ``max_moves`` are made, or the bound is met.

        Returns:
            How many moves were made.
        """
        for made in range(max_moves):
            busiest = int(self.schedule.loads.argmax())
            makespan = int(self.schedule.loads[busiest])
            if makespan <= bound:
                return made
            best = min(self._moves(busiest, makespan), key=_value, default=None)
            if best is None:
                return made
            for item in best.removed:
                self.schedule.remove(item)
            for item in best.added:
                self.schedule.add(item)
        return max_moves

    def _moves(self, busiest: int, makespan: int) -> Iterator[Move]:
        """Moves that leave every rank they touch below the makespan."""
        mine = sorted(self.schedule.on[busiest], key=lambda item: (item.sp_size, item.nanoseconds, item.start))
        targets = {p: self._least_busy(p) for p in self.lookup.sp_sizes}
        for item in mine[:_LOOKED_AT]:
            for load, block in targets[item.sp_size]:
                if block != (item.first_rank, item.sp_size) and load < makespan:
                    yield from self._relocations(item, load, block, makespan)
                    yield from self._exchanges(item, load, block, makespan)
            yield from self._shifts(item, makespan)
            yield from self._widths(item, targets, makespan)

    def _least_busy(self, sp_size: int) -> list[tuple[int, Block]]:
        """The groups of one size whose busiest rank is least busy."""
        first = self._blocks[sp_size]
        loads = (
            self.schedule.loads[first[:, None] + np.arange(sp_size)].max(axis=1)
            if sp_size > 1
            else (self.schedule.loads[first])
        )
        some = _smallest(loads, _TARGETS + 1)
        return [(int(loads[k]), (int(first[k]), sp_size)) for k in some.tolist()]

    def _relocations(self, item: Item, load: int, block: Block, makespan: int) -> Iterator[Move]:
        """Move the last or first ``k`` samples of the item, or all of them, to another group."""
        start, b, first, p, time = item
        if load + time < makespan:
            # All of the item's ranks lose its time; the busiest is the one at the makespan.
            yield Move(max(load + time, makespan - time), (item,), (item._replace(first_rank=block[0]),))
        for k in _parts(b):
            moved = self._time(p, start + b - k, k)
            if load + moved >= makespan:
                # Nor would more samples, or the longer ones at the beginning.
                return
            rest = self._time(p, start, b - k)
            parts = Item(start, b - k, first, p, rest), Item(start + b - k, k, *block, moved)
            yield Move(max(load + moved, makespan - time + rest), (item,), parts)
            moved = self._time(p, start, k)
            if load + moved < makespan:
                rest = self._time(p, start + k, b - k)
                parts = Item(start, k, *block, moved), Item(start + k, b - k, first, p, rest)
                yield Move(max(load + moved, makespan - time + rest), (item,), parts)

    def _exchanges(self, item: Item, load: int, block: Block, makespan: int) -> Iterator[Move]:
        """Swap the item for a shorter one of the other group."""
        for other in self.schedule.on[block[0]]:
            gain = item.nanoseconds - other.nanoseconds
            if other.sp_size == item.sp_size and 0 < gain < makespan - load:
                there = item._replace(first_rank=block[0])
                here = other._replace(first_rank=item.first_rank)
                yield Move(max(load + gain, makespan - gain), (item, other), (there, here))

    def _shifts(self, item: Item, makespan: int) -> Iterator[Move]:
        """Move samples over to the micro-batch of the next longer or next shorter ones."""
        start, b, first, p, _ = item
        longer = self.schedule.until.get(start)
        for other in (longer, self.schedule.at.get(start + b)):
            if other is None:
                continue
            for k in (*_parts(b), b):
                grown = self._grown(other, other.start if other is longer else start + b - k, k)
                if self._is_full(item, other, grown, makespan):
                    break
                rest = start + k if other is longer else start
                left = Item(rest, b - k, first, p, self._time(p, rest, b - k))
                value = self._outcome(item, left.nanoseconds, other, grown.nanoseconds)
                if value < makespan:
                    yield Move(value, (item, other), (left, grown) if left.batch_size else (grown,))

    def _grown(self, item: Item, start: int, more: int) -> Item:
        size = item.batch_size + more
        return item._replace(start=start, batch_size=size, nanoseconds=self._time(item.sp_size, start, size))

    def _is_full(self, item: Item, other: Item, grown: Item, makespan: int) -> bool:
        """Whether the other's group has no room for it so grown; more samples make it no shorter."""
        if not _apart(item, other):
            return False
        load = self.schedule.load_of((other.first_rank, other.sp_size))
        return load + grown.nanoseconds - other.nanoseconds >= makespan

    def _widths(self, item: Item, targets: dict[int, list[tuple[int, Block]]], makespan: int) -> Iterator[Move]:
        """Run the item on a group of another size."""
        for p, found in targets.items():
            if p == item.sp_size:
                continue
            time = self._time(p, item.start, item.batch_size)
            for load, (first, _) in found[:_TARGETS] if time < makespan else ():
                if load + time >= makespan and not item.first_rank <= first < item.first_rank + item.sp_size:
                    break
                moved = Item(item.start, item.batch_size, first, p, time)
                value = self._outcome(item, 0, moved._replace(nanoseconds=0), time)
                if value < makespan:
                    yield Move(value, (item,), (moved,))

    def _outcome(self, one: Item, one_time: int, other: Item, other_time: int) -> int:
        """Load of the busiest rank of two items' groups when the items last so long instead."""
        loads, a, b = self.schedule.loads, one.first_rank, other.first_rank
        more, other_more = one_time - one.nanoseconds, other_time - other.nanoseconds
        if _apart(one, other):
            load_of = self.schedule.load_of
            return max(load_of((a, one.sp_size)) + more, load_of((b, other.sp_size)) + other_more)
        low, high = min(a, b), max(a + one.sp_size, b + other.sp_size)
        after = loads[low:high].copy()
        after[a - low : a - low + one.sp_size] += more
        after[b - low : b - low + other.sp_size] += other_more
        return int(after.max())

    def _time(self, sp_size: int, start: int, batch_size: int) -> int:
        if not batch_size:
            return 0
        if start + batch_size > self.lookup.ends[start]:
            return NEVER
        return self.lookup.nanoseconds(sp_size, start, batch_size)


def _apart(one: Item, other: Item) -> bool:
    """Whether no rank runs both."""
    return one.first_rank + one.sp_size <= other.first_rank or other.first_rank + other.sp_size <= one.first_rank


def _value(move: Move) -> int:
    return move.value


def _smallest(values: IntArray, count: int) -> IntArray:
    """Where the ``count`` smallest values are, smallest first, of equal ones the first."""
    if len(values) > 4 * count:
        some = np.sort(np.argpartition(values, count)[: count + 1])
        # Ties at the border may fall either way there; the order of what is left does not depend on it.
        some = np.flatnonzero(values <= values[some].max())
    else:
        some = np.arange(len(values))
    return np.asarray(some[np.argsort(values[some], kind="stable")][:count])


def _parts(batch_size: int) -> tuple[int, ...]:
    """How many samples of a micro-batch may move: a few, or half, but not all."""
    return tuple(k for k in sorted({1, 2, 3, batch_size // 2}) if 0 < k < batch_size)
