"""First placement of the samples: wide groups first, longest sample first, each to the group that is free first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.kinds import Kinds
from lightning_dcp.planners.packing.rows import Rows
from lightning_dcp.topology import Block

_NO_LIMIT = 2**62
_ABSORBED = 4
"""A sample without room joins a row of a wider group if that costs at most one of these parts of a new row."""


def construct(kinds: Kinds, chosen: IntArray) -> Rows:
    """Place every sample.

    Args:
        kinds: settings and prices.
        chosen: kind of each sample, ``[n]``.
    """
    dealer = _Dealer(kinds)
    width, wanted = kinds.width[chosen], chosen.tolist()
    for index in np.unique(width)[::-1].tolist():
        dealer.deal(index, np.flatnonzero(width == index).tolist(), wanted)
    return dealer.rows()


def pour(kinds: Kinds, chosen: IntArray, target: int) -> Rows | None:
    """Place every sample so that no rank is busier than a target, always where least room is left over; or ``None``.

    Args:
        kinds: settings and prices.
        chosen: kind of each sample, ``[n]``.
        target: nanoseconds.
    """
    dealer = _Dealer(kinds)
    width, wanted = kinds.width[chosen], chosen.tolist()
    for index in np.unique(width)[::-1].tolist():
        if not dealer.pour(index, np.flatnonzero(width == index).tolist(), wanted, target):
            return None
    return dealer.rows()


class _Dealer:
    """Plain lists, for one sample at a time: faster than arrays of one element."""

    def __init__(self, kinds: Kinds) -> None:
        menu = kinds.menu
        self.kinds = kinds
        self.lengths = menu.lengths.tolist()
        self.sizes = kinds.sizes.tolist()
        self.capacity = [width.tokens for width in menu.widths]
        self.most = menu.request.limits.max_batch_size or len(self.lengths)
        self.times: dict[int, list[int]] = {}
        self.bytes: dict[int, list[int]] = {}
        self.fixed: dict[int, int] = {}
        self.least: dict[int, int] = {}
        self.loads = [0] * menu.request.world.world_size
        self.open: dict[Block, list[tuple[int, int]]] = {}
        self.wider: list[dict[int, Block]] = []
        self.first: list[int] = []
        self.kind: list[int] = []
        self.left: list[int] = []
        self.room: list[int] = []
        self.places: list[int] = []
        self.row_of = [0] * len(self.lengths)

    def rows(self) -> Rows:
        """What was placed."""
        first, kind, row_of = (
            np.asarray(values, dtype=np.int64) for values in (self.first, self.kind, self.row_of)
        )
        return Rows(self.kinds, first, kind, row_of)

    def deal(self, width: int, samples: Sequence[int], wanted: Sequence[int]) -> None:
        """Place the samples of one width, longest first, each on the idlest group."""
        blocks = self._begin(width, {wanted[i] for i in samples})
        heap = [(self.loads[first], first) for first, _ in blocks]
        heapq.heapify(heap)
        for i in samples:
            self.row_of[i] = self._place(heap, width, i, wanted[i])
        self.wider.insert(0, {rank: block for block in blocks for rank in range(block[0], block[0] + block[1])})

    def pour(self, width: int, samples: Sequence[int], wanted: Sequence[int], target: int) -> bool:
        """Place the samples of one width, longest first, each on the busiest group with room; whether all had it."""
        size = self.sizes[width]
        order = sorted((self.loads[first], first) for first, _ in self._begin(width, {wanted[i] for i in samples}))
        for i in samples:
            kind = wanted[i]
            time, fixed = self.times[kind][i], self.fixed[kind]
            place = bisect_left(order, (target - time + 1,)) - 1
            tried = 0
            while place >= 0:
                load, first = order[place]
                row = self._join((first, size), i)
                if row < 0 and load + time + fixed <= target:
                    row = self._start((first, size), i, kind)
                if row >= 0:
                    break
                tried += 1
                place = place - 1 if tried < 8 else bisect_left(order, (target - time - fixed + 1,)) - 1
            else:
                return False
            self.row_of[i] = row
            del order[place]
            insort(order, (self.loads[first], first))
        return True

    def _begin(self, width: int, kinds: set[int]) -> list[Block]:
        """The groups of a width, without a row."""
        for kind in sorted(kinds):
            self.times[kind] = self.kinds.times[kind].tolist()
            self.bytes[kind] = self.kinds.bytes[kind].tolist()
            self.fixed[kind] = int(self.kinds.fixed[kind])
            self.least[kind] = int((self.kinds.bytes[kind, :-1] // self.kinds.menu.lengths).min())
        blocks = [(first, self.sizes[width]) for first in self.kinds.firsts[width].tolist()]
        self.open.update((block, []) for block in blocks)
        return blocks

    def _place(self, heap: list[tuple[int, int]], width: int, i: int, kind: int) -> int:
        """The row that the sample joins, on the idlest group of its width or around it."""
        load, first = heap[0]
        # Samples that joined a wider group made others busier too.
        while load != self.loads[first]:
            heapq.heapreplace(heap, (self.loads[first], first))
            load, first = heap[0]
        block = first, self.sizes[width]
        row = self._join(block, i)
        if row < 0:
            row = self._absorb(block, i, kind)
        if row < 0:
            row = self._start(block, i, kind)
        heapq.heapreplace(heap, (self.loads[first], first))
        return row

    def _absorb(self, block: Block, i: int, kind: int) -> int:
        """A row of a wider group around this one that takes the sample for less than part of a new row; or -1."""
        first, size = block
        most = size * (self.times[kind][i] + self.fixed[kind] // _ABSORBED)
        for blocks in self.wider:
            if first in blocks:
                row = self._join(blocks[first], i, most)
                if row >= 0:
                    return row
        return -1

    def _join(self, block: Block, i: int, most: int = _NO_LIMIT) -> int:
        """The fullest open row of a group that has room for a sample, for at most so much rank-time; or -1."""
        rows = self.open[block]
        for position in range(bisect_left(rows, (self.lengths[i],)), len(rows)):
            row = rows[position][1]
            kind = self.kind[row]
            time = self.times[kind][i]
            if self.bytes[kind][i] <= self.room[row] and block[1] * time <= most:
                del rows[position]
                self._fill(rows, row, i)
                self._add(block, time)
                return row
        return -1

    def _start(self, block: Block, i: int, kind: int) -> int:
        """A new row with this sample."""
        row = len(self.first)
        self.first.append(block[0])
        self.kind.append(kind)
        self.left.append(self.capacity[int(self.kinds.width[kind])])
        self.room.append(int(self.kinds.room[kind]))
        self.places.append(self.most)
        self._fill(self.open[block], row, i)
        self._add(block, self.times[kind][i] + self.fixed[kind])
        return row

    def _fill(self, rows: list[tuple[int, int]], row: int, i: int) -> None:
        """Put a sample into a row and sort the row anew by the longest sample that it could still take."""
        kind = self.kind[row]
        self.left[row] -= self.lengths[i]
        self.room[row] -= self.bytes[kind][i]
        self.places[row] -= 1
        if self.places[row]:
            least = self.least[kind]
            longest = min(self.left[row], self.room[row] // least) if least else self.left[row]
            insort(rows, (longest, row))

    def _add(self, block: Block, time: int) -> None:
        first, size = block
        for rank in range(first, first + size):
            self.loads[rank] += time
