"""The best fixed ``p`` and batch sizes of bucket parallel for the data at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.assembly import padded_tokens
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import Setting, most_samples
from lightning_dcp.planners.protocol import PlanRequest

_STEPS_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """One way of bucket parallel.

    Attributes:
        sp_size: ``p`` of all batches.
        target: nanoseconds that no batch is longer than.
        batch_sizes: ``b`` of each group, int64 ``[K]``.
        nanoseconds: ``T`` of each group's batch, int64 ``[K]``.
        cost: predicted nanoseconds and the tokens that they train, the ends of the steps included.
    """

    sp_size: int
    target: int
    batch_sizes: IntArray
    nanoseconds: IntArray
    cost: tuple[int, int]

    def settings(self) -> list[list[Setting]]:
        """One setting for each group."""
        rows = zip(self.batch_sizes.tolist(), self.nanoseconds.tolist(), strict=True)
        return [[Setting(self.sp_size, b, time)] for b, time in rows]


def best_buckets(request: PlanRequest, groups: Groups, sp_sizes: Sequence[int], last: bool) -> Buckets:
    """The ``p`` and the target time of most predicted throughput over the offered samples.

    For each ``p`` the targets start at the slowest single sample, which no batch size makes faster, and rise to the
    largest batches that fit (Figure 2). Each is judged by its steps: every sample that finds its length group's
    batches full opens one, and a step has one for each group of ``p`` ranks and lasts as long as its longest.

    Args:
        request: the offered samples; ``cost.profile.sync_time`` ends every step.
        groups: the same in groups.
        sp_sizes: sizes that fit every group, at least one.
        last: no further samples will be offered.
    """
    sync_time = request.cost.profile.sync_time
    found: Buckets | None = None
    for p in sp_sizes:
        parallel = len(request.world.blocks_of(p))
        for target, b, lasting in _candidates(request, groups, p):
            opened = _opened(groups, b, last)
            tokens = b * np.diff(groups.tokens[groups.starts]) // groups.counts
            if last:
                cost = _nanoseconds(lasting[opened], parallel, sync_time), int(groups.tokens[-1])
            else:
                cost = _whole_steps(lasting[opened], tokens[opened], parallel, sync_time)
            if found is None or cost[0] * found.cost[1] < found.cost[0] * cost[1]:
                found = Buckets(sp_size=p, target=target, batch_sizes=b, nanoseconds=lasting, cost=cost)
    assert found is not None
    return found


def _candidates(request: PlanRequest, groups: Groups, sp_size: int) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Targets with the batch sizes and times of all groups."""
    sizes, counts, spared = groups.sizes, groups.counts, groups.spared
    alone = times(request, sp_size, np.asarray(1), padded_tokens(sizes, sp_size), spared)
    _, most = largest_batches(request, sp_size, sizes, counts, np.asarray([INFEASIBLE - 1]), spared)
    targets = _targets(int(alone.max()), int(most.max()))
    batch_sizes, found = largest_batches(request, sp_size, sizes, counts, targets, spared)
    yield from zip(targets.tolist(), batch_sizes, found, strict=True)


def largest_batches(
    request: PlanRequest,
    sp_size: int,
    sizes: IntArray,
    counts: IntArray,
    targets: IntArray,
    spared: NDArray[np.bool_] | None = None,
) -> tuple[IntArray, IntArray]:
    """The largest ``b`` of each group that lasts no longer than each target, and its ``T``, at one ``p``.

    Args:
        request: cost model and limits.
        sp_size: ``p``.
        sizes: largest sizes of each group, ``[K, axes]``; one sample of each lasts no longer than any target.
        counts: samples of each group; no batch is larger.
        targets: nanoseconds, ``[D]``.
        spared: groups with the fewest recomputed layers that fit, bool ``[K]``; none where ``None``.

    Returns:
        Batch sizes and nanoseconds, int64 ``[D, K]``.
    """
    tokens = padded_tokens(sizes, sp_size)
    spared = np.zeros(len(sizes), dtype=bool) if spared is None else spared
    shape = len(targets), len(sizes)
    low = np.ones(shape, dtype=np.int64)
    high = np.broadcast_to(np.maximum(most_samples(request.limits, sp_size, sizes, counts), 1), shape).copy()
    while (low < high).any():
        d, k = np.nonzero(low < high)
        middle = (low[d, k] + high[d, k] + 1) // 2
        fits = times(request, sp_size, middle, tokens[k], spared[k]) <= targets[d]
        low[d, k] = np.where(fits, middle, low[d, k])
        high[d, k] = np.where(fits, high[d, k], middle - 1)
    return low, times(request, sp_size, low, tokens, spared)


def times(
    request: PlanRequest, sp_size: int, batch_sizes: IntArray, tokens: IntArray, spared: NDArray[np.bool_]
) -> IntArray:
    """Nanoseconds within the memory: with the fewest recomputed layers where ``spared``, else as the limits say."""
    cost, limits = request.cost, request.limits
    found = cost.settings(sp_size, batch_sizes, tokens, limits.memory_bytes, limits.recompute).nanoseconds
    if spared.any():
        fewest = cost.settings(sp_size, batch_sizes, tokens, limits.memory_bytes, "auto").nanoseconds
        found = np.where(spared, fewest, found)
    return found


def _opened(groups: Groups, batch_sizes: IntArray, last: bool) -> IntArray:
    """Groups of the batches that the offered samples open, in their order; at least one of each group."""
    # With more samples to come a group's first batch is, on average, half full of samples before these.
    first = np.zeros_like(batch_sizes) if last else batch_sizes - np.maximum(batch_sizes // 2, batch_sizes == 1)
    numbers = -((first - groups.counts) // batch_sizes)
    group = np.repeat(np.arange(len(numbers)), numbers)
    number = np.arange(len(group)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    openers = groups.order[(groups.starts[:-1] + first)[group] + number * batch_sizes[group]]
    return np.asarray(group[np.argsort(openers, kind="stable")])


def _targets(least: int, most: int) -> IntArray:
    """From ``least`` to ``most`` in steps of at most a quarter."""
    # Single samples may take no time, which doubled would stay none.
    least = max(least, 1)
    found: list[int] = []
    octave = 0
    while not found or found[-1] < most:
        found += [
            (least << octave) * (_STEPS_PER_OCTAVE + k) // _STEPS_PER_OCTAVE for k in range(_STEPS_PER_OCTAVE)
        ]
        octave += 1
    return np.asarray([*(t for t in found if t < most), max(least, most)], dtype=np.int64)


def _whole_steps(times: IntArray, tokens: IntArray, parallel: int, sync_time: int) -> tuple[int, int]:
    """Nanoseconds and tokens of the whole steps of these batches; of too few for one, as if there were enough.

    Args:
        times: of the batches, at least one.
        tokens: of the batches.
        parallel: batches of a step.
        sync_time: nanoseconds of the end of a step.
    """
    steps = len(times) // parallel
    if not steps:
        return (int(times.max()) + sync_time) * len(times), int(tokens.sum()) * parallel
    used = steps * parallel
    return _nanoseconds(times[:used], parallel, sync_time), int(tokens[:used].sum())


def _nanoseconds(times: IntArray, parallel: int, sync_time: int) -> int:
    """Of the steps of these batches, ``parallel`` of them a step."""
    longest = np.pad(times, (0, -len(times) % parallel)).reshape(-1, parallel).max(axis=1)
    return int(longest.sum()) + len(longest) * sync_time
