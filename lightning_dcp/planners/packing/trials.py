"""Rows for a step: several targets of the makespan, for each a first placement that is then evened out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.bound import Bound
from lightning_dcp.planners.packing.construct import construct, pour
from lightning_dcp.planners.packing.exchange import even_out
from lightning_dcp.planners.packing.first_fit import first_fit
from lightning_dcp.planners.packing.improve import improve
from lightning_dcp.planners.packing.kinds import Kinds
from lightning_dcp.planners.packing.rows import Rows

_TARGETS = (100, 150, 50)
"""Targets of the makespan in percent of the lower bound: samples get the cheapest groups that meet them."""
_MORE_TARGETS = (110, 125, 200, 300, 75, 35, 25, 10)
_SHARES = (100, 67, 50, 40, 33)
"""Where samples are poured up to a target, each lasts at most so many percent of it: short ones fill what is left."""
_BISECTIONS = 7
_POURED = 8192
"""Samples that are poured for each share, if more than two times are needed."""
_PLACED = 4096
"""Samples that are placed in all first placements together, if more than two are needed."""
_POLISHED = 4
_SEARCHED = 4096
"""Samples and ranks that are gone through in all single changes together."""
_LEAST_CHANGES = 8


def search(bound: Bound, least: int, max_moves: int) -> Rows:
    """The best rows found.

    Args:
        bound: prices of all samples.
        least: lower bound of the makespan.
        max_moves: most rounds of exchanges and most single changes, for each placement.
    """
    count, kinds = len(bound.menu.lengths), Kinds(bound.menu)
    # The fewer samples there are, the more a better split of them can gain.
    enough = least + (least * min(count, 256) >> 14)
    placed = _placements(bound, kinds, least)
    best = _polished(next(placed), least, enough, max_moves)
    if best.makespan <= enough:
        return best
    for rows in _most_promising(bound, kinds, least, best.makespan, placed):
        best = min(best, _polished(rows, least, enough, max_moves), key=lambda rows: rows.makespan)
        if best.makespan <= enough:
            break
    return best


def _most_promising(bound: Bound, kinds: Kinds, least: int, most: int, placed: Iterator[Rows]) -> list[Rows]:
    """The best few of both kinds of placements: what was poured is hard to improve, but good from the start."""
    count = len(bound.menu.lengths)
    poured = sorted(_poured(bound, kinds, least, most), key=lambda rows: rows.makespan)
    others = sorted(islice(placed, max(_PLACED // count, 2)), key=lambda rows: rows.makespan)
    return [*poured[: _POLISHED - 1], *others[: max(_POLISHED, 128 // count)]]


def _placements(bound: Bound, kinds: Kinds, least: int) -> Iterator[Rows]:
    """First placements, the most promising one first, without repeats."""
    met = set[bytes]()
    plain = (bound.cheapest_from(*choice) for choice in product(range(len(bound.menu.widths)), (False, True)))
    for place, levels in (
        (construct, (bound.cheapest(least * percent // 100) for percent in _TARGETS)),
        (first_fit, plain),
        (construct, (bound.cheapest(least * percent // 100) for percent in _MORE_TARGETS)),
    ):
        for level in levels:
            name = place.__name__.encode() + level.tobytes()
            if name not in met:
                met.add(name)
                yield place(kinds, _kinds_of(bound, kinds, level))


def _poured(bound: Bound, kinds: Kinds, least: int, most: int) -> Iterator[Rows]:
    """For each share the placement of the least target found by bisection, if there is one below ``most``."""
    steps = min(max(_POURED // len(bound.menu.lengths), 2), _BISECTIONS)
    for percent in _SHARES:
        low, high, best = least, most, None
        for _ in range(steps):
            target = (low + high) // 2
            rows = pour(kinds, _kinds_of(bound, kinds, bound.cheapest(target * percent // 100)), target)
            if rows is None:
                low = target
            else:
                high, best = rows.makespan, rows
        if best is not None:
            yield best


def _kinds_of(bound: Bound, kinds: Kinds, chosen: IntArray) -> IntArray:
    """Kinds of the levels that were chosen, with the most recomputed layers of each."""
    index = np.full(len(bound.levels), -1, dtype=np.int64)
    for k in np.unique(chosen).tolist():
        level = bound.levels[k]
        index[k] = kinds.index((level.width, tuple(level.counts.tolist())))
    return index[chosen]


def _polished(rows: Rows, least: int, enough: int, max_moves: int) -> Rows:
    """Even out the groups of each width, narrow ones first, then relieve the busiest rank; again while that helps."""
    rows.settle(np.arange(len(rows.first)))
    rounds = max_moves
    changes = min(max_moves, max(_SEARCHED // (len(rows.row_of) + len(rows.loads)), _LEAST_CHANGES))
    while changes and rows.makespan > max(least, min(enough, _even(rows))):
        for width in range(len(rows.kinds.sizes)):
            rounds -= even_out(rows, width, rounds, max(least, _even(rows)))
        rows.settle(np.arange(len(rows.first)))
        done = improve(rows, changes, max(least, min(enough, _even(rows))))
        changes -= done
        if not done:
            break
    return rows


def _even(rows: Rows) -> int:
    """Makespan that exchanges could hardly lower: the mean of all ranks and 1/1024 more."""
    mean = int(rows.loads.sum()) // len(rows.loads)
    return mean + (mean >> 10)
