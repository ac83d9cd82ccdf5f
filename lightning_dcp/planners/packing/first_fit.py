"""The plain placement: first-fit decreasing into rows, then the longest row to the group that is free first."""

from __future__ import annotations

import heapq

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.kinds import Kinds
from lightning_dcp.planners.packing.rows import Rows


def first_fit(kinds: Kinds, chosen: IntArray) -> Rows:
    """Place every sample with few rows in mind rather than even loads.

    Args:
        kinds: settings and prices.
        chosen: kind of each sample, ``[n]``.
    """
    row_of = np.zeros(len(chosen), dtype=np.int64)
    loads = np.zeros(kinds.menu.request.world.world_size, dtype=np.int64)
    found: list[tuple[int, int]] = []
    for kind in np.unique(chosen)[::-1].tolist():
        samples = np.flatnonzero(chosen == kind)
        row = _fill(kinds, kind, samples)
        row_of[samples] = row + len(found)
        times = np.full(int(row.max()) + 1, kinds.fixed[kind])
        np.add.at(times, row, kinds.times[kind, samples])
        found += [(first, kind) for first in _deal(kinds, kind, times, loads)]
    first, kind_of = np.asarray(found, dtype=np.int64).T.copy()
    return Rows(kinds, first, kind_of, row_of)


def _fill(kinds: Kinds, kind: int, samples: IntArray) -> IntArray:
    """Row of each sample, counted from 0: the first that has room."""
    width, most = kinds.menu.widths[int(kinds.width[kind])], kinds.menu.request.limits.max_batch_size
    tokens = np.full(len(samples), width.tokens)
    room = np.full(len(samples), kinds.room[kind])
    places = np.full(len(samples), len(samples) if most is None else most)
    lengths, held = kinds.lengths[samples], kinds.bytes[kind, samples]
    row, rows = np.zeros(len(samples), dtype=np.int64), 0
    for i in range(len(samples)):
        fits = (tokens[:rows] >= lengths[i]) & (room[:rows] >= held[i]) & (places[:rows] > 0)
        row[i] = np.argmax(fits) if fits.any() else rows
        rows = max(rows, int(row[i]) + 1)
        tokens[row[i]] -= lengths[i]
        room[row[i]] -= held[i]
        places[row[i]] -= 1
    return row


def _deal(kinds: Kinds, kind: int, times: IntArray, loads: IntArray) -> list[int]:
    """First rank of the group of each row; wider rows stand in ``loads``, where these are added."""
    width = int(kinds.width[kind])
    size = int(kinds.sizes[width])
    heap = [(int(loads[first : first + size].max()), first) for first in kinds.firsts[width].tolist()]
    heapq.heapify(heap)
    firsts = [0] * len(times)
    for row in np.argsort(-times, kind="stable").tolist():
        load, first = heap[0]
        firsts[row] = first
        loads[first : first + size] += times[row]
        heapq.heapreplace(heap, (load + int(times[row]), first))
    return firsts
