"""Where the time of all ranks went: measured parts, and what the cost model says of the time in micro-batches."""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.metrics.columns import Columns
from lightning_dcp.records import StepTimes

PARTS = ("useful", "padding", "recompute", "sequence_parallel", "idle", "update", "data", "other")
"""The parts, in the order in which they are shown; the first four divide the time in micro-batches."""

_BUSY = 4


def busy_shares(plan: Columns, cost: CostModel) -> dict[str, float]:
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
    if not len(plan.sizes):
        return dict.fromkeys(PARTS[:_BUSY], 0.0)
    plain, recompute = _times(plan, cost)
    # One look for the padded rows and the samples as they are: each costs more than the numbers in it.
    sizes = np.concatenate([plan.sizes, np.repeat(plan.sizes, plan.sizes)])
    tokens = np.concatenate([plan.padded, plan.tokens])
    smallest, none = cost.sp_sizes[0], np.zeros((1, len(cost.num_layers)), dtype=np.int64)
    looked_up = smallest * cost.times(smallest, sizes, tokens, none)[0]
    alone, of_each = looked_up[: len(plan.sizes)], looked_up[len(plan.sizes) :]
    share = plan.of_rows(of_each) / np.maximum(plan.sizes * alone, 1)
    base = np.minimum(plain, alone)
    useful = base * np.minimum(share, 1.0)
    parts = np.asarray([part.sum() for part in (useful, base - useful, recompute, plain - base)], dtype=np.float64)
    whole = parts.sum()
    return dict(zip(PARTS[:_BUSY], (parts / whole if whole > 0 else parts).tolist(), strict=True))


def _times(plan: Columns, cost: CostModel) -> tuple[IntArray, IntArray]:
    """Rank-nanoseconds of each micro-batch without recompute, and what recompute adds."""
    families = len(cost.num_layers)
    counts = plan.recompute if plan.recompute.shape[1] else np.zeros((len(plan.sizes), families), dtype=np.int64)
    plain, recompute = np.zeros_like(plan.sizes), np.zeros_like(plan.sizes)
    for p in np.unique(plan.sp_sizes).tolist():
        rows = plan.sp_sizes == p
        times = cost.times(p, plan.sizes[rows], plan.padded[rows], counts[rows])
        plain[rows], recompute[rows] = p * times[0], p * times[1]
    return plain, recompute


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
