"""Many groups at once even out their loads: in each round the busy ones move or swap a sample with another group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.rows import Rows

_PAIRS = 64
"""Pairs of groups that are compared in a round, more where there are many groups."""
_SAMPLES = 16
"""Samples of each group that are compared in a round; of more, others in each round."""
_PATIENCE = 3
_WATCHED = 8
_NEVER = 2**62


def even_out(rows: Rows, width: int, rounds: int, goal: int) -> int:
    """Let the busiest groups of one size give work to others, until none gains or all are within ``goal``.

    In each round the groups in the upper half between mean and maximum are compared with several others each, idle
    and less idle ones (the idlest are often full), and make the best exchange.

    Args:
        rows: changed in place.
        width: index of the width.
        rounds: most rounds.
        goal: nanoseconds at which a group is no longer too busy.

    Returns:
        Rounds that were used.
    """
    members = _Members.build(rows, width)
    failed = used = 0
    before = rows.makespan
    while used < rounds and failed < _PATIENCE and len(members.samples) > 1:
        loads = rows.block_loads(width)
        if loads.max() <= goal:
            break
        if used % _WATCHED == _WATCHED - 1:
            if _is_slow(before, loads):
                break
            before = int(loads.max())
        busy, others = _pairs(loads, used)
        failed = 0 if _exchange(rows, members, loads, busy, others, used) else failed + 1
        used += 1
    return used


def _is_slow(before: int, loads: IntArray) -> bool:
    """Whether less than a sixteenth of what the busiest group had above the mean is gone: too little for the time."""
    return bool((before - int(loads.max())) * 16 < before - int(loads.sum()) // len(loads))


@dataclass(frozen=True, slots=True)
class _Members:
    """Who belongs to which group of a width; places without a sample or row hold -1.

    Attributes:
        samples: ``[groups, most samples]``; changed in place.
        rows: ``[groups, most rows]``.
    """

    samples: IntArray
    rows: IntArray

    @classmethod
    def build(cls, rows: Rows, width: int) -> _Members:
        firsts = rows.kinds.firsts[width]
        of_width = rows.kinds.width[rows.kind] == width
        samples = np.flatnonzero(of_width[rows.row_of])
        live = np.flatnonzero(of_width & (rows.count > 0))
        group = np.searchsorted(firsts, rows.first)
        return cls(
            _table(group[rows.row_of[samples]], samples, len(firsts), 2), _table(group[live], live, len(firsts), 0)
        )

    def columns(self, turn: int) -> IntArray:
        """Places of the samples that this round looks at."""
        places = self.samples.shape[1]
        if places <= _SAMPLES:
            return np.arange(places)
        return np.asarray((np.arange(_SAMPLES) * places // _SAMPLES + turn) % places)


def _table(group: IntArray, values: IntArray, groups: int, spare: int) -> IntArray:
    """One line for each group with its values, then -1."""
    order = np.argsort(group, kind="stable")
    count = np.bincount(group, minlength=groups)
    table = np.full((groups, int(count.max(initial=0)) + spare), -1, dtype=np.int64)
    place = np.arange(len(values)) - np.repeat(np.cumsum(count) - count, count)
    table[group[order], place] = values[order]
    return table


def _pairs(loads: IntArray, turn: int) -> tuple[IntArray, IntArray]:
    """Busy groups, busiest first, ``[B]``, and for each the groups to compare it with, ``[B, others]``."""
    order = np.argsort(-loads, kind="stable")
    most = int(loads[order[0]])
    limit = most - (most - int(loads.sum()) // len(loads)) // 2
    pairs = max(_PAIRS, 3 * len(loads) // 16)
    count = min(max(int((loads >= limit).sum()), 1), len(loads) // 2, pairs)
    rest = order[count:][::-1]
    each = min(max(pairs // count, 1), len(rest))
    place = np.arange(each)[None, :] * len(rest) // each + np.arange(count)[:, None] + turn
    return order[:count], rest[place % len(rest)]


def _exchange(rows: Rows, members: _Members, loads: IntArray, busy: IntArray, others: IntArray, turn: int) -> bool:
    """Make the best exchange of each busy group, a group taking part in one at most; whether there was any.

    Arrays of all possibilities have the shape ``[pairs, given, taken]``; behind the samples that may be taken stand
    the rows that may be joined without taking one.
    """
    columns, pairs = members.columns(turn), (np.repeat(busy, others.shape[1]), others.ravel())
    given, back, into = (
        members.samples[pairs[0]][:, columns],
        members.samples[pairs[1]][:, columns],
        members.rows[pairs[1]],
    )
    source, target = rows.row_of[given], np.concatenate([rows.row_of[back], into], axis=1)
    exists = (given >= 0)[:, :, None] & (np.concatenate([back, into], axis=1) >= 0)[:, None, :]
    none = len(rows.row_of)
    taken = np.concatenate([np.where(back >= 0, back, none), np.full_like(into, none)], axis=1)
    swap = rows.swap(given[:, :, None], source[:, :, None], taken[:, None, :], target[:, None, :])
    before = loads[pairs[0]][:, None, None], loads[pairs[1]][:, None, None]
    worst = np.maximum(before[0] + swap.source_time, before[1] + swap.target_time)
    worst = np.where(swap.fits & exists, worst, _NEVER).reshape(len(busy), -1)
    best = worst.argmin(axis=1)
    gains = np.flatnonzero(worst[np.arange(len(busy)), best] < loads[busy])
    other, a, b = np.unravel_index(best[gains], (others.shape[1], *exists.shape[1:]))
    # Of the busy groups that chose the same other one the first goes ahead.
    _, kept = np.unique(others[gains, other], return_index=True)
    gains, other, a, b = gains[kept], other[kept], a[kept], b[kept]
    pair = gains * others.shape[1] + other
    rows.exchange(given[pair, a], source[pair, a], taken[pair, b], target[pair, b])
    _move(members, busy[gains], others[gains, other], given[pair, a], taken[pair, b])
    return bool(len(gains))


def _move(members: _Members, busy: IntArray, other: IntArray, given: IntArray, taken: IntArray) -> None:
    table = members.samples
    swapped = (taken[:, None] == table[other]).any(axis=1)
    back = np.where(swapped, taken, -1)
    table[busy, (table[busy] == given[:, None]).argmax(axis=1)] = back
    # Without a place left the sample is not looked at again.
    free = np.where(swapped[:, None], table[other] == taken[:, None], table[other] < 0)
    kept = free.any(axis=1)
    table[other[kept], free[kept].argmax(axis=1)] = given[kept]
