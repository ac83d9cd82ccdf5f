"""Several planners over the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Planner
from lightning_dcp.simulate.cluster import Cluster
from lightning_dcp.simulate.run import simulate
from lightning_dcp.simulate.tally import Simulation

BUCKET = "bucket"
"""Name of the planner that the others are compared with."""


def compare(
    shapes: IntArray,
    cluster: Cluster,
    planners: Sequence[Planner] | Mapping[str, Planner],
    *,
    steps: int,
    global_batch_size: int,
    seed: int = 0,
    on_step: Callable[[str, int, IterationPlan], Any] | None = None,
    progress: bool = False,
) -> list[Simulation]:
    """:func:`~lightning_dcp.simulate.simulate` for each planner, with the ratio to ``bucket`` if it is among them.

    Args:
        shapes: sizes of the dataset's samples.
        cluster: what they run on.
        planners: the planners, with labels of their own if two have the same name.
        steps: ``K``.
        global_batch_size: ``N``.
        seed: seed of the permutation.
        on_step: called after each step with the planner's label, the step's number and its plan.
        progress: show progress bars on standard error.

    Raises:
        InfeasibleError: a sample fits no setting of a planner.
        ValueError: as in ``simulate``, or two planners have the same label.
    """
    labelled = list(planners.items()) if isinstance(planners, Mapping) else [(p.name, p) for p in planners]
    labels = [label for label, _ in labelled]
    if len({*labels}) < len(labels):
        raise ValueError(
            f"two of the planners {labels} have the same label; give a mapping from labels to planners"
        )
    results = []
    for label, planner in labelled:
        result = simulate(
            shapes,
            cluster,
            planner,
            steps=steps,
            global_batch_size=global_batch_size,
            seed=seed,
            on_step=_for(label, on_step),
            progress=progress,
        )
        results.append(replace(result, planner=label))
    return with_ratios(results, [planner.name for _, planner in labelled])


def with_ratios(results: Sequence[Simulation], names: Sequence[str]) -> list[Simulation]:
    """The results with :attr:`~lightning_dcp.simulate.Simulation.ratio_to_bucket`.

    Args:
        results: simulations of the same samples.
        names: the planner's name of each; the first ``bucket`` is the one that counts.
    """
    bucket = next((r for r, name in zip(results, names, strict=True) if name == BUCKET), None)
    return [result.against(bucket) for result in results]


def _for(
    label: str, on_step: Callable[[str, int, IterationPlan], Any] | None
) -> Callable[[int, IterationPlan], Any] | None:
    if on_step is None:
        return None
    return lambda step, plan: on_step(label, step, plan)
