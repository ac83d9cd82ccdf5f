"""Rows in the making: which samples they hold, on which group, with which settings, and how busy each rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray, Settings
from lightning_dcp.plan import loads_of
from lightning_dcp.planners.packing.kinds import Kind, Kinds


class Swap(NamedTuple):
    """What exchanges of samples between two rows would change.

    Attributes:
        fits: whether both rows stay within their limits.
        source_time: nanoseconds that the source row gains.
        target_time: nanoseconds that the target row gains.
    """

    fits: NDArray[np.bool_]
    source_time: IntArray
    target_time: IntArray


class Rows:
    """A packing in the making; rows without samples are dead and may be used again.

    Attributes:
        kinds: settings and prices.
        first: first rank of each row's group, ``[R]``.
        kind: setting of each row, ``[R]``.
        count: samples of each row, ``[R]``.
        tokens: tokens that a row can still take, ``[R]``.
        bytes: bytes that the samples of a row can still take, ``[R]``.
        row_of: row of each sample, ``[n]``.
        loads: busy nanoseconds of each rank, ``[W]``.
    """

    def __init__(self, kinds: Kinds, first: IntArray, kind: IntArray, row_of: IntArray) -> None:
        self.kinds = kinds
        self.tight = any(width.binds for width in kinds.menu.widths)
        self.most = kinds.menu.request.limits.max_batch_size
        self.first, self.kind, self.row_of = first, kind, row_of
        self.refresh()

    def refresh(self) -> None:
        """Count again what the rows hold and how long they last."""
        kinds, rows = self.kinds, len(self.first)
        order = np.argsort(self.row_of, kind="stable")
        starts = np.searchsorted(self.row_of[order], np.arange(rows))
        self.count = np.diff(np.append(starts, len(order)))

        def total(values: IntArray) -> IntArray:
            sums = np.concatenate([[0], np.cumsum(values[order])])
            return np.asarray(sums[starts + self.count] - sums[starts])

        own = self.kind[self.row_of], np.arange(len(self.row_of))
        self.tokens = self.capacity(self.kind) - total(kinds.lengths[:-1])
        self.bytes = kinds.room[self.kind] - total(kinds.bytes[own])
        time = np.where(self.count > 0, total(kinds.times[own]) + kinds.fixed[self.kind], 0)
        self.loads = loads_of(kinds.menu.request.world.world_size, self.first, self.size, time)

    def swap(self, given: IntArray, source: IntArray, taken: IntArray, target: IntArray) -> Swap:
        """What exchanges would change; the arguments are broadcast against each other.

        Args:
            given: sample that leaves its row ``source`` for ``target``.
            source: row of ``given``.
            taken: sample that goes the other way, ``n`` for none.
            target: row of ``taken``, or the row that ``given`` joins.
        """
        kinds, alone = self.kinds, taken == len(self.row_of)
        fits = self.has_room(given, source, taken, target)
        here, there = self.kind[source], self.kind[target]
        if min(here.min(), there.min()) == max(here.max(), there.max()):
            # With one setting for all an array of every pair is needed once.
            here = there = here.ravel()[0]
            target_time = kinds.times[here, given] - kinds.times[here, taken]
            source_time = -target_time
        else:
            source_time = kinds.times[here, taken] - kinds.times[here, given]
            target_time = kinds.times[there, given] - kinds.times[there, taken]
        if self.tight:
            fits &= self.bytes[target] >= kinds.bytes[there, given] - kinds.bytes[there, taken]
            fits &= self.bytes[source] >= kinds.bytes[here, taken] - kinds.bytes[here, given]
        source_time = source_time - np.where(alone & (self.count[source] == 1), kinds.fixed[here], 0)
        target_time = target_time + np.where(self.count[target] == 0, kinds.fixed[there], 0)
        return Swap(fits=fits, source_time=source_time, target_time=target_time)

    def has_room(self, given: IntArray, source: IntArray, taken: IntArray, target: IntArray) -> NDArray[np.bool_]:
        """Whether both rows would keep to the most tokens and samples; arguments as in :meth:`swap`."""
        more = self.kinds.lengths[given] - self.kinds.lengths[taken]
        fits = (self.tokens[target] >= more) & (self.tokens[source] >= -more)
        if self.most is not None:
            fits &= (taken < len(self.row_of)) | (self.count[target] < self.most)
        return np.asarray(fits)

    def exchange(self, given: IntArray, source: IntArray, taken: IntArray, target: IntArray) -> None:
        """Carry out exchanges between rows that are all different; arguments as in :meth:`swap`, ``[exchanges]``."""
        if not len(given):
            return
        kinds, back = self.kinds, taken < len(self.row_of)
        swap = self.swap(given, source, taken, target)
        for row, gained, lost, time in (
            (source, taken, given, swap.source_time),
            (target, given, taken, swap.target_time),
        ):
            kind = self.kind[row]
            self.tokens[row] -= kinds.lengths[gained] - kinds.lengths[lost]
            self.bytes[row] -= kinds.bytes[kind, gained] - kinds.bytes[kind, lost]
            for size in np.unique(self.kinds.sizes[kinds.width[kind]]).tolist():
                chosen = np.flatnonzero(self.kinds.sizes[kinds.width[kind]] == size)
                ranks = self.first[row[chosen]][:, None] + np.arange(size)
                np.add.at(self.loads, ranks, time[chosen][:, None])
        self.count[source] -= ~back
        self.count[target] += ~back
        self.row_of[given] = target
        self.row_of[taken[back]] = source[back]

    def start(self, first: int, kind: Kind) -> int:
        """An empty row on the group that begins with rank ``first``."""
        index = self.kinds.index(kind)
        dead = np.flatnonzero(self.count == 0)
        if len(dead):
            row = int(dead[0])
        else:
            row = len(self.first)
            self.first, self.kind, self.count, self.tokens, self.bytes = (
                np.append(values, 0) for values in (self.first, self.kind, self.count, self.tokens, self.bytes)
            )
        self.first[row], self.kind[row] = first, index
        self.tokens[row] = self.capacity(self.kind[row])
        self.bytes[row] = self.kinds.room[index]
        return row

    def ask(self, width: int, members: Sequence[IntArray]) -> Settings:
        """The best settings of rows of these samples on groups of one width."""
        request, menu = self.kinds.menu.request, self.kinds.menu.widths[width]
        parts = np.stack([menu.parts[samples].sum(axis=0) for samples in members])
        return request.cost.packed(menu.sp_size, parts, request.limits.memory_bytes, request.limits.recompute)

    def settle(self, rows: IntArray) -> None:
        """Give these rows the fewest recomputed layers that fit."""
        for width, menu in enumerate(self.kinds.menu.widths):
            chosen = rows[(self.count[rows] > 0) & (self.kinds.width[self.kind[rows]] == width)]
            if not menu.binds or not len(chosen) or self.kinds.menu.request.limits.recompute != "auto":
                continue
            members = self.members(chosen)
            counts = self.ask(width, members).recompute.tolist()
            for row, samples, count in zip(chosen.tolist(), members, counts, strict=True):
                self._change_kind(row, samples, self.kinds.index((width, tuple(count))))

    def _change_kind(self, row: int, samples: IntArray, new: int) -> None:
        kinds, old = self.kinds, int(self.kind[row])
        if old == new:
            return
        first, size = int(self.first[row]), int(self.kinds.sizes[kinds.width[new]])
        more = (
            kinds.times[new, samples].sum() - kinds.times[old, samples].sum() + kinds.fixed[new] - kinds.fixed[old]
        )
        self.loads[first : first + size] += more
        self.kind[row] = new
        self.bytes[row] = kinds.room[new] - kinds.bytes[new, samples].sum()

    def members(self, rows: IntArray) -> list[IntArray]:
        """Samples of each of these rows, longest first."""
        order = np.argsort(self.row_of, kind="stable")
        edges = np.searchsorted(self.row_of[order], np.stack([rows, rows + 1]))
        return [order[a:b] for a, b in edges.T.tolist()]

    @property
    def makespan(self) -> int:
        """Nanoseconds of the busiest rank."""
        return int(self.loads.max())

    def block_loads(self, width: int) -> IntArray:
        """Nanoseconds of the busiest rank of each group of a width."""
        firsts = self.kinds.firsts[width]
        if self.kinds.sizes[width] == 1:
            return self.loads[firsts]
        edges = np.stack([firsts, firsts + self.kinds.sizes[width]], axis=1)
        return np.asarray(np.maximum.reduceat(np.append(self.loads, 0), edges.ravel())[::2])

    def capacity(self, kind: IntArray) -> IntArray:
        """Most tokens of rows of these kinds."""
        most = np.asarray([width.tokens for width in self.kinds.menu.widths], dtype=np.int64)
        return np.asarray(most[self.kinds.width[kind]])

    @property
    def size(self) -> IntArray:
        """Ranks of each row's group, ``[R]``."""
        return np.asarray(self.kinds.sizes[self.kinds.width[self.kind]])
