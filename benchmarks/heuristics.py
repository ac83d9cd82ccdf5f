"""Heuristics that a padded plan is compared with: how published schedulers cut and place the samples of a step.

All cut the samples, sorted by length, into runs and give the longest micro-batch to the group that is free first, wide
groups before narrow ones. They know the same cost model and limits as the planner.

- :func:`grouped`: dynamic-program grouping; each sample on the narrowest group that holds it, the samples of one
  width cut into micro-batches of least total time.
- :func:`bucket`: one group size for all; the batch size of each micro-batch is lowered until it lasts no longer than
  the longest sample alone. The best group size counts.
- :func:`first_fit`: first-fit decreasing into token budgets, each sample on the narrowest group that holds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.assembly import settings_within
from lightning_dcp.planners.protocol import PlanRequest

Heuristic = Callable[[PlanRequest], int]
Cut = list[tuple[int, int]]
"""``(batch size, nanoseconds)`` of the micro-batches of one width."""


def grouped(request: PlanRequest) -> int:
    """Makespan of dynamic-program grouping, nanoseconds."""
    return _dealt(request, {p: _least_time(request, p, lengths) for p, lengths in _by_width(request).items()})


def first_fit(request: PlanRequest) -> int:
    """Makespan of first-fit decreasing, nanoseconds."""
    return _dealt(
        request, {p: _largest(request, p, lengths, INFEASIBLE) for p, lengths in _by_width(request).items()}
    )


def bucket(request: PlanRequest) -> int:
    """Makespan of one group size for all, the best one, nanoseconds."""
    found = []
    lengths = np.sort(request.shapes[:, 0])[::-1]
    for p in _sizes(request):
        longest = int(_times(request, p, lengths[:1], np.ones(1, dtype=np.int64))[0, 0])
        if longest < INFEASIBLE:
            found.append(_dealt(request, {p: _largest(request, p, lengths, longest + 1)}))
    return min(found)


HEURISTICS: dict[str, Heuristic] = {"grouped": grouped, "bucket": bucket, "first-fit": first_fit}


def _sizes(request: PlanRequest) -> list[int]:
    return [p for p in request.world.sp_sizes if p in request.cost.sp_sizes]


def _times(request: PlanRequest, sp_size: int, lengths: IntArray, batch_sizes: IntArray) -> IntArray:
    """Nanoseconds of so many samples padded to each length, ``[batch sizes, n]``."""
    return settings_within(request, sp_size, batch_sizes[:, None], lengths[:, None]).nanoseconds


def _by_width(request: PlanRequest) -> dict[int, IntArray]:
    """Lengths, falling, of the samples whose narrowest group this is."""
    lengths = np.sort(request.shapes[:, 0])[::-1]
    sizes = _sizes(request)
    fits = np.stack([_times(request, p, lengths, np.ones(1, dtype=np.int64))[0] < INFEASIBLE for p in sizes])
    width = fits.argmax(axis=0)
    return {p: lengths[width == k] for k, p in enumerate(sizes) if (width == k).any()}


def _batches(request: PlanRequest, sp_size: int, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Batch sizes worth trying, and the nanoseconds of each from each sample on, ``[batch sizes, n]``."""
    sizes = np.asarray(request.cost.batch_sizes(len(lengths)), dtype=np.int64)
    time = _times(request, sp_size, lengths, sizes)
    beyond = np.arange(len(lengths)) + sizes[:, None] > len(lengths)
    return sizes, np.where(beyond, INFEASIBLE, time)


def _least_time(request: PlanRequest, sp_size: int, lengths: IntArray) -> Cut:
    """Cut a run of falling lengths into micro-batches of least total time."""
    sizes, time = _batches(request, sp_size, lengths)
    rest, choice = np.zeros(len(lengths) + 1), np.zeros(len(lengths), dtype=np.int64)
    for i in range(len(lengths) - 1, -1, -1):
        total = time[:, i] + rest[np.minimum(i + sizes, len(lengths))]
        choice[i] = total.argmin()
        rest[i] = total[choice[i]]
    return _walk(sizes, time, choice)


def _largest(request: PlanRequest, sp_size: int, lengths: IntArray, limit: int) -> Cut:
    """Cut a run of falling lengths into the largest micro-batches that last less than ``limit``."""
    sizes, time = _batches(request, sp_size, lengths)
    return _walk(sizes, time, np.maximum((time < limit).cumprod(axis=0).sum(axis=0) - 1, 0))


def _walk(sizes: IntArray, time: IntArray, choice: IntArray) -> Cut:
    cut, i = [], 0
    while i < len(choice):
        k = int(choice[i])
        cut.append((int(sizes[k]), int(time[k, i])))
        i += int(sizes[k])
    return cut


def _dealt(request: PlanRequest, cuts: dict[int, Cut]) -> int:
    """Makespan after the longest micro-batch went to the group that is free first, wide groups before narrow ones."""
    loads = np.zeros(request.world.world_size, dtype=np.int64)
    for p in sorted(cuts, reverse=True):
        heap = [(int(loads[first : first + p].max()), first) for first, _ in request.world.blocks_of(p)]
        heapq.heapify(heap)
        for _, nanoseconds in sorted(cuts[p], key=lambda piece: -piece[1]):
            load, first = heap[0]
            loads[first : first + p] += nanoseconds
            heapq.heapreplace(heap, (load + nanoseconds, first))
    return int(loads.max())
