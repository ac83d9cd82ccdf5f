"""Drawing a step: which batches it has, on which ranks, and which samples they take."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.assembly import Placement, settings_within
from lightning_dcp.planners.grouped.accumulation import Kinds, share
from lightning_dcp.planners.grouped.blocks import FreeBlocks
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import Setting, by_throughput
from lightning_dcp.planners.protocol import PlanRequest

Menus = Sequence[Sequence[Setting]]
"""For each group the settings to choose from, the best first."""

Accumulate = Callable[[Kinds], tuple[IntArray, int]]
"""Micro-batches of each kind of batch and the nanoseconds of the step, as
:func:`~lightning_dcp.planners.grouped.accumulation.micro_batches` gives them."""


class Batch(NamedTuple):
    """A batch of a step: the group its samples come from, its settings and its place."""

    group: int
    setting: Setting
    first_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A step before its samples are taken.

    Attributes:
        batches: in the order in which they were opened.
        accumulated: ``g`` of each batch.
        nanoseconds: predicted time of the step.
        tokens: of the samples that it takes.
        short: ranks are left that a batch could use, had there been more samples.
    """

    batches: Sequence[Batch]
    accumulated: Sequence[int]
    nanoseconds: int
    tokens: int
    short: bool


def draw(
    request: PlanRequest, groups: Groups, menus: Menus, accumulate: Accumulate, last: bool
) -> list[Placement]:
    """The micro-batches of a step.

    The offered samples are walked along in the order of the permutation. A sample whose group has no place left in
    the batches up to now opens one, with the best settings of its group that the free ranks allow; one that fits no
    free ranks waits for the next step. When all ranks are given out, ``g`` is chosen and the batches take their
    samples, the first ones of each group.

    Where the samples end before the ranks do, batches are cut: into halves, quarters and so on, and at single
    samples onto wider groups, whichever of these trains most tokens per second, the step's end included.

    Args:
        request: the offered samples.
        groups: the same samples in groups.
        menus: settings of each group; the group of the first sample has one at least.
        accumulate: chooses ``g``.
        last: no further samples will be offered, so that micro-batches may be smaller than their batch.
    """
    found = _draw(request, groups, menus, accumulate, last)
    if found.short:
        sync = request.cost.profile.sync_time
        for smaller in _smaller(request, groups, menus):
            other = _draw(request, groups, smaller, accumulate, last)
            if other.tokens * (found.nanoseconds + sync) > found.tokens * (other.nanoseconds + sync):
                found = other
            if not other.short:
                break
    return _take(groups, found)


def _draw(request: PlanRequest, groups: Groups, menus: Menus, accumulate: Accumulate, last: bool) -> Draw:
    batches, short = _open(request, groups, menus)
    kinds = Counter((batch.group, batch.setting) for batch in batches)
    supply = _supply(kinds, groups.counts.tolist(), last)
    totals, nanoseconds = accumulate(
        Kinds(
            nanoseconds=_array(max(setting.nanoseconds, 1) for _, setting in kinds),
            sp_sizes=_array(setting.sp_size for _, setting in kinds),
            counts=_array(kinds.values()),
            supply=_array(supply),
        )
    )
    shares = {kind: share(int(total), kinds[kind]) for kind, total in zip(kinds, totals, strict=True)}
    taken: Counter[int] = Counter()
    for (group, setting), total in zip(kinds, totals, strict=True):
        taken[group] += int(total) * setting.batch_size
    return Draw(
        batches=batches,
        accumulated=[shares[batch.group, batch.setting].pop(0) for batch in batches],
        nanoseconds=nanoseconds,
        tokens=sum(groups.tokens_of(k, min(n, int(groups.counts[k]))) for k, n in taken.items()),
        short=short,
    )


def _open(request: PlanRequest, groups: Groups, menus: Menus) -> tuple[list[Batch], bool]:
    """Batches in the order of the samples that opened them, and whether there were too few."""
    free = FreeBlocks(request.world)
    counts = groups.counts.tolist()
    # The next sample of each group without a place; members ascend, so no other sample needs to be looked at.
    waiting = [(int(groups.members(k)[0]), k) for k in range(len(counts))]
    heapq.heapify(waiting)
    places = [0] * len(counts)
    batches: list[Batch] = []
    while waiting and free.ranks:
        _, k = heapq.heappop(waiting)
        setting = next((s for s in menus[k] if free.has(s.sp_size)), None)
        if setting is None:
            continue
        batches.append(Batch(k, setting, free.take(setting.sp_size)))
        places[k] += setting.batch_size
        if places[k] < counts[k]:
            heapq.heappush(waiting, (int(groups.members(k)[places[k]]), k))
    return batches, any(free.has(p) for p in _sp_sizes(menus))


def _supply(kinds: Counter[tuple[int, Setting]], counts: Sequence[int], last: bool) -> list[int]:
    """Micro-batches that the samples of each kind's group make; kinds of one group share by their speed."""
    speeds = {(group, s): ((n * s.batch_size) << 64) // max(s.nanoseconds, 1) for (group, s), n in kinds.items()}
    whole: Counter[int] = Counter()
    for (group, _), speed in speeds.items():
        whole[group] += speed
    supply = []
    for (group, setting), n in kinds.items():
        samples = counts[group] * speeds[group, setting] // whole[group]
        supply.append(max(n, -(-samples // setting.batch_size) if last else samples // setting.batch_size))
    return supply


def _take(groups: Groups, found: Draw) -> list[Placement]:
    """Give the first samples of each group to its batches: one micro-batch each, in turn, as often as they run."""
    of_group: dict[int, list[int]] = {}
    for index, batch in enumerate(found.batches):
        of_group.setdefault(batch.group, []).append(index)
    placed: list[list[Placement]] = [[] for _ in found.batches]
    for group, indices in of_group.items():
        members = groups.members(group)
        taken = 0
        for turn in range(max(found.accumulated[i] for i in indices)):
            for i in (i for i in indices if found.accumulated[i] > turn):
                _, setting, first_rank = found.batches[i]
                chosen = members[taken : taken + setting.batch_size]
                taken += len(chosen)
                if len(chosen):
                    placed[i].append(Placement(tuple(chosen.tolist()), first_rank, setting.sp_size))
    order = sorted(range(len(placed)), key=lambda i: found.batches[i].first_rank)
    return [placement for i in order for placement in placed[i]]


def _smaller(request: PlanRequest, groups: Groups, menus: Menus) -> Iterator[Menus]:
    """The menus with smaller batches down to single samples, then these on wider groups only."""
    sp_sizes = _sp_sizes(menus)
    largest = max(setting.batch_size for menu in menus for setting in menu)
    parts = 1
    while parts < largest:
        parts *= 2
        yield _cut(request, groups, menus, parts, sp_sizes[0])
    first = int(np.argmin(groups.order[groups.starts[:-1]]))
    for p in sp_sizes[1:]:
        if menus[first][-1:] and max(setting.sp_size for setting in menus[first]) >= p:
            yield _cut(request, groups, menus, parts, p)


def _cut(request: PlanRequest, groups: Groups, menus: Menus, parts: int, narrowest: int) -> Menus:
    """The menus with batches cut into so many parts, on groups of ``narrowest`` ranks and more."""
    found: list[list[Setting]] = [[] for _ in menus]
    for p in _sp_sizes(menus):
        rows = [(k, -(-s.batch_size // parts)) for k, menu in enumerate(menus) for s in menu if s.sp_size == p]
        if p < narrowest or not rows:
            continue
        groups_of, batch_sizes = (np.asarray(column, dtype=np.int64) for column in zip(*rows, strict=True))
        times = settings_within(request, p, batch_sizes, groups.sizes[groups_of]).nanoseconds
        for (k, b), time in zip(rows, times.tolist(), strict=True):
            if time < INFEASIBLE:
                found[k].append(Setting(p, b, time))
    return [sorted(menu, key=by_throughput) for menu in found]


def _sp_sizes(menus: Menus) -> list[int]:
    return sorted({setting.sp_size for menu in menus for setting in menu})


def _array(values: Iterable[int]) -> IntArray:
    return np.asarray(list(values), dtype=np.int64)
