"""Drawing a step: which batches it has, on which ranks, and which samples they take."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.assembly import Placement
from lightning_dcp.planners.grouped.accumulation import Kinds, share
from lightning_dcp.planners.grouped.blocks import FreeBlocks
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import Menus, Setting
from lightning_dcp.planners.protocol import PlanRequest

Accumulate = Callable[[Kinds], tuple[IntArray, int]]
"""Micro-batches of each kind of batch and the nanoseconds of the step, as
:func:`~lightning_dcp.planners.grouped.accumulation.micro_batches` gives them."""


_Settings = Sequence[Sequence[Setting]]

_MUCH_IDLE = 3
"""Percent of the ranks' time; below, batches are not made shorter."""

_PATIENCE = 12
"""Steps of a fifth without gain after which no shorter batches are tried."""


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
        worth: rank-nanoseconds that its samples would take with the best settings of their groups.
        short: much of the ranks' time is idle.
    """

    batches: Sequence[Batch]
    accumulated: Sequence[int]
    nanoseconds: int
    worth: int
    short: bool


def draw(
    request: PlanRequest,
    groups: Groups,
    menus: Menus,
    accumulate: Accumulate,
    *,
    last: bool,
    shorten: bool = True,
) -> list[Placement]:
    """The micro-batches of a step.

    The offered samples are walked along in the order of the permutation. A sample whose group has no place left in
    the batches up to now opens one, with the best settings of its group that the free ranks allow; one that fits no
    free ranks waits for the next step. When all ranks are given out, ``g`` is chosen and the batches take their
    samples, the first ones of each group.

    Full batches are long, and no ``g`` within the limits balances times of 3 and 4 seconds, or groups that have too
    few samples for two of them. So where 3 % of the time are idle the settings of shorter batches are tried (fewer
    samples, or wider groups for long ones), in steps of a fifth, as long as 3 % are idle; the draw is taken that makes
    the best use of the time, the step's end included, in terms of the best settings (Eq. 1 and 2 together).

    Args:
        request: the offered samples.
        groups: the same samples in groups.
        menus: settings of each group, one at least.
        accumulate: chooses ``g``.
        last: no further samples will be offered, so that micro-batches may be smaller than their batch.
        shorten: whether shorter batches are tried.
    """
    worth = [menu[0].sp_size * menu[0].nanoseconds // menu[0].batch_size for menu in menus.best]
    sync = request.cost.profile.sync_time
    found = other = _draw(request, groups, menus.best, worth, accumulate, last)
    patience = _PATIENCE if shorten else 0
    for limit in _limits(menus):
        if not (patience and other.short):
            break
        other = _draw(request, groups, menus.within(limit).best, worth, accumulate, last)
        patience -= 1
        if other.worth * (found.nanoseconds + sync) > found.worth * (other.nanoseconds + sync):
            found, patience = other, _PATIENCE
    return _take(groups, found)


def _limits(menus: Menus) -> Iterator[int]:
    """Four fifths of the longest time, four fifths of these and so on, down to single samples."""
    limit = max(menu[0].nanoseconds for menu in menus.best)
    shortest = min(setting.nanoseconds // setting.batch_size for menu in menus.best for setting in menu)
    while limit > shortest:
        limit = 4 * limit // 5
        yield limit


def _draw(
    request: PlanRequest,
    groups: Groups,
    menus: _Settings,
    worth: Sequence[int],
    accumulate: Accumulate,
    last: bool,
) -> Draw:
    batches = _open(request, groups, menus)
    numbers = Counter((batch.group, batch.setting) for batch in batches)
    kinds = Kinds(
        nanoseconds=_array(max(setting.nanoseconds, 1) for _, setting in numbers),
        sp_sizes=_array(setting.sp_size for _, setting in numbers),
        counts=_array(numbers.values()),
        supply=_array(_supply(numbers, groups.counts.tolist(), last)),
    )
    totals, nanoseconds = accumulate(kinds)
    work = int((totals * kinds.sp_sizes * kinds.nanoseconds).sum())
    shares = {kind: share(int(total), numbers[kind]) for kind, total in zip(numbers, totals, strict=True)}
    taken: Counter[int] = Counter()
    for (group, setting), total in zip(numbers, totals.tolist(), strict=True):
        taken[group] += total * setting.batch_size
    return Draw(
        batches=batches,
        accumulated=[shares[batch.group, batch.setting].pop(0) for batch in batches],
        nanoseconds=nanoseconds,
        worth=sum(worth[k] * min(n, int(groups.counts[k])) for k, n in taken.items()),
        short=work * 100 < request.world.world_size * nanoseconds * (100 - _MUCH_IDLE),
    )


def _open(request: PlanRequest, groups: Groups, menus: _Settings) -> list[Batch]:
    """Batches in the order of the samples that opened them."""
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
    return batches


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


def _array(values: Iterable[int]) -> IntArray:
    return np.asarray(list(values), dtype=np.int64)
