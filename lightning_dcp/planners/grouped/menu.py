"""The throughput-optimal batch size of each group for each sequence-parallel size (Eq. 1, Algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, CostModel, IntArray
from lightning_dcp.planners.assembly import may_share, padded_tokens
from lightning_dcp.planners.protocol import Limits, PlanRequest

_TOLERANCE = 1e-4
"""Throughputs that differ by less are equal; of equal settings the shortest micro-batch balances best."""


class Setting(NamedTuple):
    """Settings of a batch: ``p``, ``b`` and the time ``T`` of one micro-batch."""

    sp_size: int
    batch_size: int
    nanoseconds: int


def ranked(
    request: PlanRequest, sp_sizes: tuple[int, ...], sizes: IntArray, counts: IntArray
) -> list[list[Setting]]:
    """For each group its best setting for each ``p`` that it fits, the most throughput ``b s / (p T)`` first.

    The samples of a group count as long as the largest of them. Recomputed layers are as ``limits.recompute`` says:
    with ``"auto"`` the fewest that fit (Algorithm 1 as meant: it compares throughput, and every ``r`` that an integer
    ``b`` leads to), with ``"full"`` all of them (DCP-inter).

    Args:
        request: cost model and limits.
        sp_sizes: ``p`` to choose from, ascending.
        sizes: largest sizes of each group, ``[K, axes]``.
        counts: samples of each group; no batch is larger.
    """
    best = [(p, *best_batch_sizes(request, p, sizes, counts)) for p in sp_sizes]
    return [
        sorted(
            (Setting(p, int(b[k]), int(t[k])) for p, b, t in best if t[k] < INFEASIBLE),
            key=by_throughput,
        )
        for k in range(len(sizes))
    ]


def by_throughput(setting: Setting) -> tuple[float, int]:
    """Key that sorts settings of one group by falling throughput (Eq. 1)."""
    # A division of two integers below 2**53 is the same on every machine.
    return setting.sp_size * setting.nanoseconds / setting.batch_size, setting.sp_size


def best_batch_sizes(
    request: PlanRequest, sp_size: int, sizes: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    """For each group the ``b`` of least ``T / b`` at one ``p`` among ALL integers within the limits, and its ``T``.

    Branch and bound: a range of batch sizes whose lower bound is not below the best ``T / b`` found is left out, the
    others are halved. The result is within 0.01 % of the optimum.

    Returns:
        Batch sizes and nanoseconds, int64 ``[K]``; :data:`INFEASIBLE` where not even one sample fits.
    """
    cost, limits = request.cost, request.limits
    tokens = padded_tokens(sizes, sp_size)
    group, low, high = _ranges(cost, _most(limits, sp_size, sizes, counts))
    best = np.full(len(sizes), np.inf)
    tried = [(group[:0], low[:0], low[:0])]
    while len(group):
        time, least = cost.least_share(sp_size, (low, high), tokens[group], limits.memory_bytes, limits.recompute)
        fits = time < INFEASIBLE
        tried.append((group[fits], low[fits], time[fits]))
        np.minimum.at(best, group[fits], time[fits] / low[fits])
        open_ = fits & (low < high) & (least * (1 + _TOLERANCE) < best[group])
        group, low, high = group[open_], low[open_], high[open_]
        middle = (low + high) // 2
        group, low, high = np.tile(group, 2), np.append(low, middle + 1), np.append(middle, high)
    return _shortest(best, *(np.concatenate(column) for column in zip(*tried, strict=True)))


def largest_batches(
    request: PlanRequest, sp_size: int, sizes: IntArray, counts: IntArray, targets: IntArray
) -> tuple[IntArray, IntArray]:
    """The largest ``b`` of each group that lasts no longer than each target, and its ``T``, at one ``p``.

    Args:
        request: cost model and limits.
        sp_size: ``p``.
        sizes: largest sizes of each group, ``[K, axes]``; one sample of each lasts no longer than any target.
        counts: samples of each group; no batch is larger.
        targets: nanoseconds, ``[D]``.

    Returns:
        Batch sizes and nanoseconds, int64 ``[D, K]``.
    """
    cost, limits = request.cost, request.limits
    tokens = padded_tokens(sizes, sp_size)
    shape = len(targets), len(sizes)
    low = np.ones(shape, dtype=np.int64)
    high = np.broadcast_to(np.maximum(_most(limits, sp_size, sizes, counts), 1), shape).copy()
    while (low < high).any():
        d, k = np.nonzero(low < high)
        middle = (low[d, k] + high[d, k] + 1) // 2
        time = cost.settings(sp_size, middle, tokens[k], limits.memory_bytes, limits.recompute).nanoseconds
        fits = time <= targets[d]
        low[d, k] = np.where(fits, middle, low[d, k])
        high[d, k] = np.where(fits, high[d, k], middle - 1)
    return low, cost.settings(sp_size, low, tokens, limits.memory_bytes, limits.recompute).nanoseconds


def _shortest(
    best: NDArray[np.float64], group: IntArray, low: IntArray, time: IntArray
) -> tuple[IntArray, IntArray]:
    """Of the settings of each group that reach its best ``T / b``, the one of least time."""
    good = time / low <= best[group] * (1 + _TOLERANCE)
    group, low, time = group[good], low[good], time[good]
    order = np.lexsort((low, time, group))
    found, first = np.unique(group[order], return_index=True)
    batch_sizes, times = np.ones(len(best), dtype=np.int64), np.full(len(best), INFEASIBLE)
    batch_sizes[found], times[found] = low[order][first], time[order][first]
    return batch_sizes, times


def _most(limits: Limits, sp_size: int, sizes: IntArray, counts: IntArray) -> IntArray:
    """Largest batch of each group before memory is asked; 0 where the group may not run on ``sp_size`` ranks."""
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
