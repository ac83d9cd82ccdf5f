"""Where the time of all ranks went: measured parts, and what the cost model says of the time in micro-batches."""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.records import StepTimes

PARTS = ("useful", "padding", "recompute", "sequence_parallel", "idle", "update", "data", "other")
"""The parts, in the order in which they are shown; the first four divide the time in micro-batches."""

_BUSY = 4
_ROOM = 2**62


def busy_shares(plan: IterationPlan, cost: CostModel) -> dict[str, float]:
    """How the time in micro-batches is divided by the cost model; shares of 1, all zero for an empty plan.

    A micro-batch of ``b`` samples padded to ``S`` costs ``p T(b, S, p, r)`` rank-nanoseconds. Of these

    - recompute is ``p (T(b, S, p, r) - T(b, S, p, 0))``,
    - sequence parallelism ``p T(b, S, p, 0) - T(b, S, 1, 0)``, not below zero,
    - padding and useful the rest, useful in the proportion of ``sum_i T(b, s_i, 1, 0) / b`` to ``T(b, S, 1, 0)``.

    Where the profile has no ``p = 1``, its smallest size stands for it.

    Args:
        plan: the step.
        cost: the cost model that it was made with.
    """
    totals = np.zeros(_BUSY)
    for sp_size in sorted({m.sp_size for m in plan.micro_batches}):
        totals += _parts([m for m in plan.micro_batches if m.sp_size == sp_size], sp_size, cost)
    whole = totals.sum()
    shares = totals / whole if whole > 0 else totals
    return dict(zip(PARTS[:_BUSY], shares.tolist(), strict=True))


def _parts(rows: list[MicroBatch], sp_size: int, cost: CostModel) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Rank-nanoseconds of the four parts, summed over micro-batches of one size."""
    families = len(cost.num_layers)
    sizes = np.asarray([m.batch_size for m in rows], dtype=np.int64)
    padded = np.asarray([m.padded_tokens for m in rows], dtype=np.int64) // sizes
    counts = np.asarray([m.recompute or (0,) * families for m in rows], dtype=np.int64)
    whole = sp_size * cost.times(sp_size, sizes, padded, counts)
    plain = sp_size * _plain(cost, sp_size, sizes, padded)
    alone = _alone(cost, sizes, padded)
    tokens = np.asarray([_product(shape) for m in rows for shape in m.shapes], dtype=np.int64)
    of_each = _alone(cost, np.repeat(sizes, sizes), tokens)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    share = np.add.reduceat(of_each, starts) / np.maximum(sizes * alone, 1)
    base = np.minimum(plain, alone)
    useful = base * np.minimum(share, 1.0)
    parts = (useful, base - useful, whole - plain, plain - base)
    return np.asarray([part.sum() for part in parts], dtype=np.float64)


def _plain(cost: CostModel, sp_size: int, sizes: IntArray, tokens: IntArray) -> IntArray:
    return cost.settings(sp_size, sizes, tokens, _ROOM, "none").nanoseconds


def _alone(cost: CostModel, sizes: IntArray, tokens: IntArray) -> IntArray:
    """Rank-nanoseconds without recompute on the smallest group."""
    smallest = cost.sp_sizes[0]
    return smallest * _plain(cost, smallest, sizes, tokens)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for axis in shape:
        product *= axis
    return product


class Waterfall:
    """Adds up the parts over the steps of a run."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, times: StepTimes, busy: dict[str, float]) -> dict[str, float]:
        """Count a step in and return its own shares of 1.

        Args:
            times: what was measured.
            busy: :func:`busy_shares` of its plan.
        """
        # A step without a micro-batch has no time in one, so nothing is lost where all shares are zero.
        step = {name: times.busy * share for name, share in busy.items()}
        step |= {"idle": times.idle, "update": times.update, "data": times.data, "other": times.other}
        for name, seconds in step.items():
            self._seconds[name] += seconds
        return _shares(step)

    def seconds(self) -> dict[str, float]:
        """Rank-seconds of each part."""
        return dict(self._seconds)

    def shares(self) -> dict[str, float]:
        """Share of each part in all time of all ranks; they add up to 1, or all are 0 before the first step."""
        return _shares(self._seconds)


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: seconds[name] / total if total > 0 else 0.0 for name in PARTS}
