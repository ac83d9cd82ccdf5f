"""Numbers about a step, computed from its record; nothing here communicates."""

from __future__ import annotations

from lightning_dcp.plan import IterationPlan
from lightning_dcp.records import StepRecord


def mean_settings(plan: IterationPlan) -> dict[str, float]:
    """Means of the settings of a step: ``p`` per token, ``g`` per rank, and recomputed layers per token.

    A token counts with its own micro-batch's settings, so a long sample weighs what it costs.
    """
    tokens = max(plan.num_tokens, 1)
    rows = plan.micro_batches
    return {
        "mean_sp_size": sum(m.num_tokens * m.sp_size for m in rows) / tokens,
        "mean_micro_batches": sum(m.sp_size for m in rows) / plan.world_size,
        "mean_recompute": sum(m.num_tokens * sum(m.recompute) for m in rows) / tokens,
    }


def step_metrics(record: StepRecord, seconds: float) -> dict[str, float]:
    """What :class:`~lightning_dcp.callback.DCPCallback` logs of a step; the same on every rank but for clock noise.

    Args:
        record: the finished step.
        seconds: time since the end of the step before, so that data loading and the optimizer are included.
    """
    plan = record.plan
    return {
        "tokens_per_second": plan.num_tokens / seconds if seconds > 0 else 0.0,
        "idle_planned": plan.idle_ratio,
        "idle_measured": record.idle_ratio,
        "padding": plan.padding_ratio,
        "gap": plan.gap,
        **mean_settings(plan),
    }
