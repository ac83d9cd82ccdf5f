"""Single changes that relieve the busiest rank: a sample or a row goes elsewhere, alone or in exchange for another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.exact import Contents
from lightning_dcp.planners.packing.rows import Rows

_PLACES = 1500
"""Places that are looked at for one change, those on the idlest groups."""
_OWN = 24
"""Samples and rows of the busiest rank that are looked at for one change."""
_EXACT = 600
"""Changes up to which recomputed layers are chosen anew for each, where memory is tight."""
_NEVER = 2**60
_NOWHERE = -(2**61)


def improve(rows: Rows, changes: int, goal: int) -> int:
    """Relieve the busiest rank as long as one change leaves all ranks that it touches less busy than that one was.

    Args:
        rows: changed in place.
        changes: most changes.
        goal: nanoseconds up to which no rank is too busy.

    Returns:
        Changes made.
    """
    for done in range(changes):
        if rows.makespan <= goal or not _relieve(rows):
            return done
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Samples in rows, rows, and groups without a row, as the other side of a change; arrays of one length.

    Attributes:
        row: the row, 0 where a new one would be started.
        new: whether a new row would be started.
        taken: sample that comes back, ``n`` for none.
        first: first rank of the group.
        width: index of its width.
        load: nanoseconds of the busiest rank of the group.
    """

    row: IntArray
    new: NDArray[np.bool_]
    taken: IntArray
    first: IntArray
    width: IntArray
    load: IntArray

    @classmethod
    def of(cls, rows: Rows) -> Places:
        """All there are, or those on the idlest groups if there are too many."""
        none, live = len(rows.row_of), np.flatnonzero(rows.count > 0)
        firsts = rows.kinds.firsts
        by_rank = np.zeros((len(firsts), len(rows.loads)), dtype=np.int64)
        for k, first in enumerate(firsts):
            by_rank[k, first] = rows.block_loads(k)
        row = np.concatenate([rows.row_of, live])
        first = np.concatenate([rows.first[row], *firsts])
        width = np.concatenate([rows.kinds.width[rows.kind[row]], *(0 * f + k for k, f in enumerate(firsts))])
        load = by_rank[width, first]
        chosen = np.sort(np.argsort(load, kind="stable")[:_PLACES])
        empty = np.zeros(len(first) - len(row), dtype=np.int64)
        return cls(
            row=np.concatenate([row, empty])[chosen],
            new=chosen >= len(row),
            taken=np.minimum(chosen, none),
            first=first[chosen],
            width=width[chosen],
            load=load[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """Busiest of the ranks that a change touches, for each place; ``_NOWHERE`` where there is no such rank.

    Attributes:
        here: of the busy group only.
        both: of both groups.
        there: of the other group only.
    """

    here: IntArray
    both: IntArray
    there: IntArray

    @classmethod
    def of(cls, rows: Rows, first: int, size: int, places: Places) -> _Overlap:
        """Between a group of the busiest rank and the groups of the places; groups are nested or disjoint."""
        end, sizes, most = first + size, rows.kinds.sizes[places.width], rows.makespan
        inside = (places.first >= first) & (places.first + sizes <= end)
        around = (places.first <= first) & (places.first + sizes >= end)
        here = np.where(around, _NOWHERE, most)
        both = np.where(around, most, np.where(inside, places.load, _NOWHERE))
        there = np.where(inside, _NOWHERE, places.load)
        busiest = int(rows.loads.argmax())
        for k in np.flatnonzero(inside ^ around).tolist():
            a, b = int(places.first[k]), int(places.first[k] + sizes[k])
            if around[k]:
                there[k] = max(_most(rows.loads[a:first]), _most(rows.loads[end:b]))
            elif a <= busiest < b:
                here[k] = max(_most(rows.loads[first:a]), _most(rows.loads[b:end]))
        return cls(here=here, both=both, there=there)

    def worst(self, here: IntArray, there: IntArray) -> IntArray:
        """Busiest of the touched ranks after the times of the two groups change by so much, ``[given, places]``."""
        apart = np.maximum(self.here + here, self.there + there)
        return np.asarray(np.maximum(apart, self.both + here + there), dtype=np.int64)


def _most(loads: IntArray) -> int:
    return int(loads.max(initial=_NOWHERE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The best change of one kind: worst time that it leaves, what goes, and where to.

    Attributes:
        worst: busiest of the touched ranks afterwards, nanoseconds.
        given: the sample or row that goes.
        place: index into the places.
    """

    worst: int
    given: int
    place: int


def _relieve(rows: Rows) -> bool:
    """Make the best change of one sample or row of the busiest rank; whether there was one."""
    busiest = int(rows.loads.argmax())
    own = np.flatnonzero((rows.first <= busiest) & (rows.first + rows.size > busiest) & (rows.count > 0))
    places = Places.of(rows)
    groups = [own[rows.size[own] == size] for size in np.unique(rows.size[own]).tolist()]
    overlaps = [_Overlap.of(rows, int(rows.first[same[0]]), int(rows.size[same[0]]), places) for same in groups]
    for best_of, move in ((_best_sample, _move_sample), (_best_row, _move_row)):
        found = [best_of(rows, same, places, overlap) for same, overlap in zip(groups, overlaps, strict=True)]
        best = min(found, key=lambda change: change.worst)
        if best.worst < rows.makespan:
            move(rows, best.given, places, best.place)
            return True
    return False


def _some(values: IntArray) -> IntArray:
    return values if len(values) <= _OWN else values[np.arange(_OWN) * len(values) // _OWN]


def _best_sample(rows: Rows, own: IntArray, places: Places, overlap: _Overlap) -> _Change:
    """The best change of a sample in one of the rows ``own``, which run on one group."""
    given = _some(np.flatnonzero(np.isin(rows.row_of, own)))[:, None]
    source, kinds = rows.row_of[given], rows.kinds
    exact = rows.tight and given.size * len(places.row) <= _EXACT
    swap = (Contents.of(rows) if exact else rows).swap(given, source, places.taken, places.row)
    alone = np.minimum(np.stack([width.alone for width in kinds.menu.widths]), _NEVER)[places.width, given]
    emptied = np.where(rows.count[source] == 1, kinds.fixed[rows.kind[source]], 0)
    here = np.where(places.new, -kinds.times[rows.kind[source], given] - emptied, swap.source_time)
    fits = np.where(places.new, alone < _NEVER, swap.fits & (places.row != source))
    worst = np.where(fits, overlap.worst(here, np.where(places.new, alone, swap.target_time)), _NEVER)
    a, place = divmod(int(worst.argmin()), worst.shape[1])
    return _Change(worst=int(worst[a, place]), given=int(given[a, 0]), place=place)


def _best_row(rows: Rows, own: IntArray, places: Places, overlap: _Overlap) -> _Change:
    """The best change of one of the rows ``own`` as a whole: joined to another row, or on another group."""
    given, kinds = _some(own), rows.kinds
    members = rows.members(given)
    time, size = (np.stack([values[:, m].sum(axis=1) for m in members]) for values in (kinds.times, kinds.bytes))
    tokens = (rows.capacity(rows.kind[given]) - rows.tokens[given])[:, None]
    fresh = np.stack([rows.ask(width, members).nanoseconds for width in range(len(rows.kinds.sizes))], axis=1)
    capacity = np.asarray([width.tokens for width in kinds.menu.widths])
    fresh = np.where(tokens <= capacity, np.minimum(fresh, _NEVER), _NEVER)[:, places.width]
    kind = rows.kind[places.row]
    joins = (rows.tokens[places.row] >= tokens) & (rows.bytes[places.row] >= size[:, kind])
    joins &= (places.taken == len(rows.row_of)) & (places.row != given[:, None])
    if rows.most is not None:
        joins &= rows.count[places.row] + rows.count[given][:, None] <= rows.most
    fits = np.where(places.new, fresh < _NEVER, joins)
    here = -(time[np.arange(len(given)), rows.kind[given]] + kinds.fixed[rows.kind[given]])[:, None]
    worst = np.where(fits, overlap.worst(here, np.where(places.new, fresh, time[:, kind])), _NEVER)
    a, place = divmod(int(worst.argmin()), worst.shape[1])
    return _Change(worst=int(worst[a, place]), given=int(given[a]), place=place)


def _move_row(rows: Rows, given: int, places: Places, place: int) -> None:
    members, width = np.flatnonzero(rows.row_of == given), int(places.width[place])
    if places.new[place]:
        counts = rows.ask(width, [members]).recompute[0]
        target = rows.start(int(places.first[place]), (width, tuple(counts.tolist())))
    else:
        target = int(places.row[place])
    for sample in members.tolist():
        one = (np.asarray([value]) for value in (sample, given, len(rows.row_of), target))
        rows.exchange(*one)
    rows.settle(np.asarray([target]))


def _move_sample(rows: Rows, given: int, places: Places, place: int) -> None:
    source, target = int(rows.row_of[given]), int(places.row[place])
    if places.new[place]:
        width = int(places.width[place])
        counts = rows.kinds.menu.widths[width].alone_counts[given]
        target = rows.start(int(places.first[place]), (width, tuple(counts.tolist())))
    one = (np.asarray([value]) for value in (given, source, int(places.taken[place]), target))
    rows.exchange(*one)
    rows.settle(np.asarray([source, target]))
