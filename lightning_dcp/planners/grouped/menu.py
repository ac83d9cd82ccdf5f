"""The throughput-optimal batch size of each group for each sequence-parallel size (Eq. 1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, CostModel, IntArray
from lightning_dcp.planners.assembly import may_share, padded_tokens
from lightning_dcp.planners.grouped.groups import with_policy
from lightning_dcp.planners.protocol import Limits, PlanRequest

_TOLERANCE = 0.002
"""Throughputs that differ by less are equal; of equal settings the shortest micro-batch balances best."""


class Setting(NamedTuple):
    """Settings of a batch: ``p``, ``b`` and the time ``T`` of one micro-batch."""

    sp_size: int
    batch_size: int
    nanoseconds: int

    def towards(self, larger: Setting, limit: int) -> Setting:
        """The largest batch up to a larger one that lasts ``limit`` nanoseconds, if the time between is a line."""
        samples, time = larger.batch_size - self.batch_size, max(larger.nanoseconds - self.nanoseconds, 1)
        more = min((limit - self.nanoseconds) * samples // time, samples)
        return Setting(self.sp_size, self.batch_size + more, self.nanoseconds + more * time // samples)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Times of the batches of all groups at one ``p``, at the batch sizes that were looked at.

    Attributes:
        sp_size: ``p``.
        group: group of each point, ascending; int64 ``[points]``.
        batch_sizes: ``b``, ascending within a group from 1.
        nanoseconds: ``T``.
    """

    sp_size: int
    group: IntArray
    batch_sizes: IntArray
    nanoseconds: IntArray

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        sp_size: int,
        sizes: IntArray,
        counts: IntArray,
        spared: NDArray[np.bool_] | None = None,
    ) -> Curve:
        """Look for the least ``T / b`` of each group among ALL integers ``b`` within the limits.

        Branch and bound: a range of batch sizes whose lower bound is not 0.2 % below the best ``T / b`` found is left
        out, the others are halved. The samples of a group count as long as the largest of them. Recomputed layers are
        as ``limits.recompute`` says.

        Args:
            request: cost model and limits.
            sp_size: ``p``.
            sizes: largest sizes of each group, ``[K, axes]``.
            counts: samples of each group; no batch is larger.
            spared: groups with the fewest recomputed layers that fit, bool ``[K]``; none where ``None``.
        """
        if spared is None or not spared.any():
            points = cls._points(request, sp_size, sizes, counts)
        else:
            most = cls._points(request, sp_size, sizes, np.where(spared, 0, counts))
            fewest = cls._points(with_policy(request, "auto"), sp_size, sizes, np.where(spared, counts, 0))
            points = [np.concatenate(column) for column in zip(most, fewest, strict=True)]
        group, low, time = points
        order = np.lexsort((low, group))
        group, low, time = group[order], low[order], time[order]
        new = np.append(True, (group[1:] != group[:-1]) | (low[1:] != low[:-1]))[: len(group)]
        return cls(sp_size=sp_size, group=group[new], batch_sizes=low[new], nanoseconds=time[new])

    @staticmethod
    def _points(request: PlanRequest, sp_size: int, sizes: IntArray, counts: IntArray) -> list[IntArray]:
        """Group, batch size and time of all points that were looked at and fit, in no order."""
        cost, limits = request.cost, request.limits
        tokens = padded_tokens(sizes, sp_size)
        group, low, high = _ranges(cost, most_samples(limits, sp_size, sizes, counts))
        best = np.full(len(sizes), np.inf)
        tried = [(group[:0], low[:0], low[:0])]
        while len(group):
            time, least = cost.least_share(
                sp_size, (low, high), tokens[group], limits.memory_bytes, limits.recompute
            )
            fits = time < INFEASIBLE
            tried.append((group[fits], low[fits], time[fits]))
            np.minimum.at(best, group[fits], time[fits] / low[fits])
            open_ = fits & (low < high) & (least * (1 + _TOLERANCE) < best[group])
            group, low, high = group[open_], low[open_], high[open_]
            middle = (low + high) // 2
            group, low, high = np.tile(group, 2), np.append(low, middle + 1), np.append(middle, high)
        return [np.concatenate(column) for column in zip(*tried, strict=True)]

    def best(self) -> dict[int, Setting]:
        """For each group that fits the setting of most throughput; of nearly equal ones the shortest."""
        shares = self.nanoseconds / self.batch_sizes
        least = np.full(int(self.group.max(initial=-1)) + 1, np.inf)
        np.minimum.at(least, self.group, shares)
        good = np.flatnonzero(shares <= least[self.group] * (1 + _TOLERANCE))
        order = good[np.lexsort((self.batch_sizes[good], self.nanoseconds[good], self.group[good]))]
        found, first = np.unique(self.group[order], return_index=True)
        return {int(k): self._setting(int(i)) for k, i in zip(found, order[first], strict=True)}

    def within(self, limit: int, most: Mapping[int, int]) -> dict[int, Setting]:
        """For each group the largest batch of about ``limit`` nanoseconds, single samples however long they last.

        Between two points of the curve the time is taken to be a line.

        Args:
            limit: nanoseconds.
            most: largest batch of each group; other groups are left out.
        """
        caps = np.zeros(int(self.group.max(initial=-1)) + 1, dtype=np.int64)
        for k, cap in most.items():
            caps[k] = cap
        usable = self.batch_sizes <= caps[self.group]
        short = usable & ((self.nanoseconds <= limit) | (self.batch_sizes == 1))
        found = {}
        for k, i in zip(*(column.tolist() for column in _lasts(self.group, short)), strict=True):
            setting = self._setting(i)
            if i + 1 < len(usable) and usable[i + 1] and self.group[i + 1] == k and setting.nanoseconds < limit:
                setting = setting.towards(self._setting(i + 1), limit)
            found[k] = setting
        return found

    def _setting(self, index: int) -> Setting:
        return Setting(self.sp_size, int(self.batch_sizes[index]), int(self.nanoseconds[index]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Menus:
    """What the batches of each group may be.

    Attributes:
        best: for each group one setting for each ``p``, the most throughput ``b s / (p T)`` (Eq. 1) first.
        curves: the times of smaller batches.
    """

    best: Sequence[Sequence[Setting]]
    curves: Sequence[Curve]

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        sp_sizes: Sequence[int],
        sizes: IntArray,
        counts: IntArray,
        spared: NDArray[np.bool_] | None = None,
    ) -> Menus:
        """The settings of most throughput.

        With ``limits.recompute="auto"`` the fewest recomputed layers that fit (Algorithm 1 as meant: it compares
        throughput, and every ``r`` that an integer ``b`` leads to), with ``"full"`` all of them (DCP-inter).

        Args:
            request: cost model and limits.
            sp_sizes: ``p`` to choose from, ascending.
            sizes: largest sizes of each group, ``[K, axes]``.
            counts: samples of each group; no batch is larger.
            spared: groups with the fewest recomputed layers that fit all the same, bool ``[K]``; none where ``None``.
        """
        curves = [Curve.build(request, p, sizes, counts, spared) for p in sp_sizes]
        found = [curve.best() for curve in curves]
        best = [sorted((of[k] for of in found if k in of), key=by_throughput) for k in range(len(sizes))]
        return cls(best=best, curves=curves)

    def within(self, limit: int) -> Menus:
        """The menus with batches of at most about ``limit`` nanoseconds: fewer samples, or wider groups only.

        A group that no setting ends in time keeps its fastest.
        """
        found: list[list[Setting]] = [[] for _ in self.best]
        for curve in self.curves:
            most = {
                k: s.batch_size for k, menu in enumerate(self.best) for s in menu if s.sp_size == curve.sp_size
            }
            for k, setting in curve.within(limit, most).items():
                found[k].append(setting)
        best = [
            sorted((s for s in menu if s.nanoseconds <= limit), key=by_throughput)
            or [min(menu, key=lambda s: (s.nanoseconds, s.sp_size))]
            for menu in found
        ]
        return Menus(best=best, curves=self.curves)


def ranked(
    request: PlanRequest, sp_sizes: Sequence[int], sizes: IntArray, counts: IntArray
) -> Sequence[Sequence[Setting]]:
    """:attr:`Menus.best` of these groups; the arguments are those of :meth:`Menus.build`."""
    return Menus.build(request, sp_sizes, sizes, counts).best


def by_throughput(setting: Setting) -> tuple[float, int]:
    """Key that sorts settings of one group by falling throughput (Eq. 1)."""
    # A division of two integers below 2**53 is the same on every machine.
    return setting.sp_size * setting.nanoseconds / setting.batch_size, setting.sp_size


def _lasts(group: IntArray, chosen: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Groups with chosen points, and the index of the last of each."""
    index = np.flatnonzero(chosen)
    last = np.append(group[index][1:] != group[index][:-1], True)[: len(index)]
    return group[index[last]], index[last]


def most_samples(limits: Limits, sp_size: int, sizes: IntArray, counts: IntArray) -> IntArray:
    """Largest batch of each group before memory is asked; 0 where the group may not run on ``sp_size`` ranks.

    Args:
        limits: limits of the request.
        sp_size: ``p``.
        sizes: largest sizes of each group, ``[K, axes]``.
        counts: samples of each group.
    """
    most = np.where(may_share(limits, sp_size, sizes), counts, 0)
    if limits.max_batch_size is not None:
        most = np.minimum(most, limits.max_batch_size)
    if limits.max_tokens is not None:
        # b tokens // p <= max_tokens
        room = (limits.max_tokens + 1) * sp_size - 1
        most = np.minimum(most, room // padded_tokens(sizes, sp_size))
    return np.asarray(most)


def _ranges(cost: CostModel, most: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Ranges of batch sizes from 1 to ``most[k]``, without a measured one inside: group, first, last."""
    starts = np.asarray(cost.batch_sizes(int(most.max(initial=0))), dtype=np.int64)
    if not len(starts):
        return (np.zeros(0, dtype=np.int64),) * 3
    ends = np.append(starts[1:] - 1, most.max())
    group, k = np.nonzero(starts <= most[:, None])
    return group, starts[k], np.minimum(ends[k], most[group])
