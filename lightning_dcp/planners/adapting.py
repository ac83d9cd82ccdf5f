"""What planners take from the dataset and the run where they were not told."""

from __future__ import annotations

from dataclasses import replace

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths import length_groups
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped.base import Grouped
from lightning_dcp.planners.protocol import Planner


def for_dataset(planner: Planner, shapes: IntArray, samples_per_step: int | None = None) -> Planner:
    """The planner with the length groups of the whole dataset, or with bounds of a step, where it has none.

    The grouped planners then compare lengths by the same groups in every step, and need not cut those of the samples
    at hand, of which some hold few.

    Args:
        planner: any planner.
        shapes: sizes of all samples of the dataset, ``[n, axes]``.
        samples_per_step: the run's ``global_batch_size``, if it has one.
    """
    if isinstance(planner, Grouped) and planner.edges is None:
        return replace(planner, edges=length_groups(shapes, planner.length_groups))
    if isinstance(planner, Floating) and samples_per_step is not None:
        return planner.around(samples_per_step)
    return planner
