"""Rows of packed sequences, filled from the permutation by first fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, IntArray, Settings
from lightning_dcp.interpolation import MAX_VALUE
from lightning_dcp.planners.assembly import round_up, shortest
from lightning_dcp.planners.packing.menu import row_tokens
from lightning_dcp.planners.protocol import PlanRequest

_DEPTH = 2048
"""Samples that a row looks at beyond twice those that fill it; more would seldom fill it better."""

_MIX = 8192
"""Samples that say what a token of memory holds on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Filled rows on groups of one size.

    Attributes:
        sp_size: ``p``.
        members: positions in the request of each row's samples, ascending; the first row holds the first sample.
        settings: times, bytes and recomputed layers, ``[R]``.
        tokens: of all rows.
    """

    sp_size: int
    members: list[IntArray]
    settings: Settings
    tokens: int

    def makespan(self, groups: int) -> int:
        """Nanoseconds of the rows dealt in turn to so many groups."""
        padding = -len(self.members) % groups
        times = np.pad(self.settings.nanoseconds, (0, padding)).reshape(-1, groups)
        return int(times.sum(axis=0).max())


def fill(request: PlanRequest, sp_size: int, budget: int, count: int) -> Rows:
    """Up to ``count`` rows of at most ``budget`` tokens and within the memory.

    A sample that fits no row under the recompute policy of the request gets a row of its own, with the fewest
    recomputed layers that fit.

    Args:
        request: the offered samples, of one axis; each fits a row of its own, with the fewest recomputed layers at
            least.
        sp_size: ``p``.
        budget: tokens of a row, not below the longest sample.
        count: most rows.
    """
    lengths = request.shapes[:, 0]
    spared = lengths > _longest(request, sp_size)
    # A sample that takes the whole budget shares its row with none.
    filling = np.where(spared, budget, lengths) if spared.any() else lengths
    members = first_fit(filling, budget, count, request.limits.max_batch_size or len(lengths))
    settings = _settings(request, sp_size, members, spared)
    # The budget holds for the mix of the window; a row of other lengths may need more.
    while (over := settings.nanoseconds >= INFEASIBLE).any():
        members = [
            row[: len(row) - max(len(row) // 32, 1)] if o else row for row, o in zip(members, over, strict=True)
        ]
        settings = _settings(request, sp_size, members, spared)
    tokens = int(lengths[np.concatenate(members)].sum())
    return Rows(sp_size=sp_size, members=members, settings=settings, tokens=tokens)


def first_fit(lengths: IntArray, budget: int, count: int, most: int) -> list[IntArray]:
    """Each sample in turn into the first of ``count`` rows that has room for it; samples that find none are left.

    First fit fills a row with every sample, in order, that fits what is left of it, and hands the others on to the
    next row; so it goes row by row. A row looks at the next 2048 samples and twice those that fill it.

    Args:
        lengths: tokens of the samples, ``[n]``, none above ``budget``.
        budget: tokens of a row.
        count: most rows; as many are made as the samples fill.
        most: most samples of a row.

    Returns:
        Positions of each row's samples, ascending.
    """
    depth = _DEPTH + 2 * budget * len(lengths) // int(lengths.sum())
    waiting = np.arange(min(depth, len(lengths)))
    fresh = len(waiting)
    rows: list[IntArray] = []
    while len(rows) < count and len(waiting):
        taken = _row(lengths[waiting], budget, most)
        rows.append(waiting[taken])
        more = np.arange(fresh, min(fresh + len(taken), len(lengths)))
        waiting = np.concatenate([np.delete(waiting, taken), more])
        fresh += len(more)
    return rows


def _row(lengths: IntArray, room: int, most: int) -> IntArray:
    """Places of the samples that one row takes, in order."""
    places = np.arange(len(lengths))
    found: list[IntArray] = []
    while True:
        places = places[lengths[places] <= room]
        if not len(places) or not most:
            return np.concatenate(found)
        ends = np.cumsum(lengths[places])
        count = min(int(np.searchsorted(ends, room, side="right")), most)
        found.append(places[:count])
        room, most = room - int(ends[count - 1]), most - count
        places = places[count:]


def largest_budget(request: PlanRequest, sp_size: int) -> int:
    """Most tokens of a row on ``sp_size`` ranks: as many of the window's mix as fit the memory, whole for each rank.

    Not below the longest sample, which must fit.
    """
    cost, limits = request.cost, request.limits
    lengths = request.shapes[:, 0]
    mix = lengths[:_MIX]
    sums = np.minimum(cost.packed_parts(sp_size, mix), MAX_VALUE >> 2).sum(axis=0).tolist()
    tokens = int(mix.sum())
    low = least_budget(request, sp_size) // sp_size
    high = max(min(row_tokens(limits, sp_size), round_up(int(lengths.sum()), sp_size)) // sp_size, low)
    while low < high:
        middle = (low + high + 1) // 2
        parts = np.asarray([min(s * middle * sp_size // tokens, MAX_VALUE) for s in sums], dtype=np.int64)
        if cost.packed(sp_size, parts, limits.memory_bytes, limits.recompute).nanoseconds < INFEASIBLE:
            low = middle
        else:
            high = middle - 1
    return low * sp_size


def least_budget(request: PlanRequest, sp_size: int) -> int:
    """Tokens of the shortest row that holds the longest sample offered."""
    return round_up(max(int(request.shapes[:, 0].max()), shortest(sp_size)), sp_size)


def fits_alone(request: PlanRequest, sp_size: int, length: int) -> bool:
    """Whether the memory holds a row of one sample under the recompute policy of the request."""
    cost, limits = request.cost, request.limits
    parts = cost.packed_parts(sp_size, np.asarray(length))
    return bool(cost.packed(sp_size, parts, limits.memory_bytes, limits.recompute).nanoseconds < INFEASIBLE)


def _longest(request: PlanRequest, sp_size: int) -> int:
    """Tokens of the longest sample offered, or if it does not fit alone, the most that do; 0 if none do."""
    low, high = 0, int(request.shapes[:, 0].max())
    if fits_alone(request, sp_size, high):
        return high
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_alone(request, sp_size, middle) else (low, middle)
    return low


def _settings(request: PlanRequest, sp_size: int, members: list[IntArray], spared: NDArray[np.bool_]) -> Settings:
    cost, limits = request.cost, request.limits
    starts = np.cumsum([0, *(len(row) for row in members[:-1])])
    parts = cost.packed_parts(sp_size, request.shapes[np.concatenate(members), 0])
    sums = np.add.reduceat(np.minimum(parts, MAX_VALUE >> 2), starts, axis=0)
    most = cost.packed(sp_size, sums, limits.memory_bytes, limits.recompute)
    few = spared[[row[0] for row in members]]
    if not few.any():
        return most
    fewest = cost.packed(sp_size, sums, limits.memory_bytes, "auto")
    return Settings(
        nanoseconds=np.where(few, fewest.nanoseconds, most.nanoseconds),
        bytes=np.where(few, fewest.bytes, most.bytes),
        recompute=np.where(few[:, None], fewest.recompute, most.recompute),
    )
