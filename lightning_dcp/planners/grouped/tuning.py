"""The best fixed ``p`` and batch sizes of bucket parallel for the data at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.assembly import padded_tokens
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import Setting, largest_batches
from lightning_dcp.planners.protocol import PlanRequest

_UNIT = 30
"""Probabilities are counted in units of ``2**-30``: products of two stay below ``2**62``."""

_STEPS_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """One way of bucket parallel.

    Attributes:
        sp_size: ``p`` of all batches.
        target: nanoseconds that no batch is longer than.
        batch_sizes: ``b`` of each group, int64 ``[K]``.
        nanoseconds: ``T`` of each group's batch, int64 ``[K]``.
        seconds: predicted nanoseconds per step and rank-group, times the batches of all offered samples: what is
            made least, as ``(numerator, denominator)``.
    """

    sp_size: int
    target: int
    batch_sizes: IntArray
    nanoseconds: IntArray
    cost: tuple[int, int]

    def menus(self) -> list[list[Setting]]:
        """One setting for each group."""
        rows = zip(self.batch_sizes.tolist(), self.nanoseconds.tolist(), strict=True)
        return [[Setting(self.sp_size, b, time)] for b, time in rows]


def best_buckets(request: PlanRequest, groups: Groups, sp_sizes: Sequence[int]) -> Buckets:
    """The ``p`` and the target time of most predicted throughput over the offered samples.

    For each ``p`` the targets start at the slowest single sample, which no batch size makes faster, and rise to the
    largest batches that fit (Figure 2). A step runs one batch on each group of ``p`` ranks and lasts as long as its
    longest; which lengths meet in a step is left to chance, in proportion to the batches of each length group.

    Args:
        request: the offered samples; ``cost.profile.sync_time`` ends every step.
        groups: the same in groups.
        sp_sizes: sizes that fit every group, at least one.
    """
    found: Buckets | None = None
    for p in sp_sizes:
        for other in _candidates(request, groups, p):
            if found is None or other.cost[0] * found.cost[1] < found.cost[0] * other.cost[1]:
                found = other
    assert found is not None
    return found


def _candidates(request: PlanRequest, groups: Groups, sp_size: int) -> list[Buckets]:
    limits, counts = request.limits, groups.counts
    tokens = padded_tokens(groups.sizes, sp_size)
    alone = request.cost.settings(sp_size, np.asarray(1), tokens, limits.memory_bytes, limits.recompute)
    _, most = largest_batches(request, sp_size, groups.sizes, counts, np.asarray([INFEASIBLE - 1]))
    targets = _targets(int(alone.nanoseconds.max()), int(most.max()))
    batch_sizes, times = largest_batches(request, sp_size, groups.sizes, counts, targets)
    parallel = len(request.world.blocks_of(sp_size))
    return [
        Buckets(
            sp_size=sp_size,
            target=target,
            batch_sizes=b,
            nanoseconds=t,
            cost=_cost(-(-counts // b), t, parallel, request.cost.profile.sync_time),
        )
        for target, b, t in zip(targets.tolist(), batch_sizes, times, strict=True)
    ]


def _targets(least: int, most: int) -> IntArray:
    """From ``least`` to ``most`` in steps of at most a quarter."""
    found: list[int] = []
    octave = 0
    while not found or found[-1] < most:
        found += [
            (least << octave) * (_STEPS_PER_OCTAVE + k) // _STEPS_PER_OCTAVE for k in range(_STEPS_PER_OCTAVE)
        ]
        octave += 1
    return np.asarray([*(t for t in found if t < most), max(least, most)], dtype=np.int64)


def _cost(batches: IntArray, times: IntArray, parallel: int, sync_time: int) -> tuple[int, int]:
    """Predicted nanoseconds of all batches, ``parallel`` of them a step, as a fraction."""
    count = int(batches.sum())
    together = min(parallel, count)
    return (_expected_longest(batches, times, together) + sync_time) * max(count, parallel), parallel


def _expected_longest(batches: IntArray, times: IntArray, together: int) -> int:
    """Expected longest time among so many batches drawn by chance: the sum over ``T`` of its share of maxima.

    In integers, since a power of floats may differ in its last bit between two machines.
    """
    order = np.argsort(times, kind="stable")
    below = (np.cumsum(batches[order]) << _UNIT) // batches.sum()
    chance = np.full(len(below), 1 << _UNIT, dtype=np.int64)
    while together:
        if together & 1:
            chance = chance * below >> _UNIT
        below = below * below >> _UNIT
        together >>= 1
    # The longest is certain to be the maximum of all.
    chance[-1] = 1 << _UNIT
    shift = max(int(times.max()).bit_length() - 32, 0)
    weighted = int((np.diff(chance, prepend=0) * (times[order] >> shift)).sum())
    return weighted >> _UNIT << shift if shift else weighted >> _UNIT
