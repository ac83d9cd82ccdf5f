"""Plans of a simulation as JSON lines, for other programs."""

from __future__ import annotations

from typing import Any

from lightning_dcp.plan import IterationPlan


def plan_record(step: int, plan: IterationPlan, size: int) -> dict[str, Any]:
    """One step in the format of ``lightning-dcp simulate --plans``; all times are seconds.

    Args:
        step: number of the step, from 0.
        plan: the step.
        size: samples of the dataset; ids of later epochs become positions in it again.
    """
    return {
        "step": step,
        "makespan": plan.makespan / 1e9,
        "lower_bound": plan.lower_bound / 1e9,
        "micro_batches": [
            {
                "samples": [i % size for i in m.sample_ids],
                "shapes": [list(shape) for shape in m.shapes],
                "padded_shape": list(m.padded_shape),
                "packed": m.packed,
                "first_rank": m.first_rank,
                "sp_size": m.sp_size,
                "recompute": list(m.recompute),
                "seconds": m.nanoseconds / 1e9,
                "bytes": m.bytes,
            }
            for m in plan.micro_batches
        ],
    }
