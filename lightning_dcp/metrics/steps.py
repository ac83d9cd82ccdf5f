"""Numbers about a step, computed from its record; nothing here communicates."""

from __future__ import annotations

from lightning_dcp.metrics.columns import Columns
from lightning_dcp.plan import IterationPlan
from lightning_dcp.records import StepRecord


def mean_settings(plan: Columns, world_size: int) -> dict[str, float]:
    """Means of the settings of a step: ``p`` per token, ``g`` per rank, and recomputed layers per token.

    A token counts with its own micro-batch's settings, so a long sample weighs what it costs.
    """
    tokens = plan.of_rows(plan.tokens)
    total = max(int(tokens.sum()), 1)
    return {
        "mean_sp_size": int(tokens @ plan.sp_sizes) / total,
        "mean_micro_batches": int(plan.sp_sizes.sum()) / world_size,
        "mean_recompute": int(tokens @ plan.recompute.sum(axis=1)) / total,
    }


def step_metrics(record: StepRecord, columns: Columns, seconds: float) -> dict[str, float]:
    """What :class:`~lightning_dcp.callback.DCPCallback` logs of a step; the same on every rank but for clock noise.

    Args:
        record: the finished step.
        columns: its plan as arrays.
        seconds: time since the end of the step before, so that data loading and the optimizer are included.
    """
    plan, padded = record.plan, columns.num_padded
    return {
        "seconds": seconds,
        "seconds_planned": plan.makespan / 1e9,
        "seconds_measured": record.seconds,
        "idle_planned": plan.idle_ratio,
        "idle_measured": record.idle_ratio,
        "padding": 1.0 - columns.num_tokens / padded if padded else 0.0,
        # A plan without a bound has no gap; infinity would spoil every mean.
        **({"gap": plan.gap} if plan.lower_bound else {}),
        "stray": record.stray,
        "stray_max": float(record.stray_max),
        **mean_settings(columns, plan.world_size),
    }


class GapWatch:
    """Tells once when the mean gap of a window of steps is above what a good plan of good data has.

    Windows do not overlap. Plans without a lower bound do not count.

    Args:
        window: plans of a window.
        limit: mean gap that passes.
    """

    def __init__(self, window: int = 20, limit: float = 0.05) -> None:
        self._window = window
        self._limit = limit
        self._plans: list[IterationPlan] = []
        self._told = False

    def add(self, plan: IterationPlan) -> tuple[float, IterationPlan] | None:
        """Count a plan in; at the end of the first window above the limit, its mean gap and its worst plan.

        The worst plan is the one that lasts longest beyond its bound.
        """
        if self._told or not plan.lower_bound:
            return None
        self._plans.append(plan)
        if len(self._plans) < self._window:
            return None
        plans, self._plans = self._plans, []
        mean = sum(one.gap for one in plans) / len(plans)
        self._told = mean > self._limit
        return (mean, max(plans, key=lambda one: one.makespan - one.lower_bound)) if self._told else None
