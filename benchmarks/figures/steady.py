"""Planners in the middle of an epoch: what they do while there are always samples to choose from.

An epoch of a large dataset has thousands of steps. Those that can be simulated on many clusters and data sets would be
mostly beginning and end: at first a planner that draws finds as many short samples as it likes, with the long ones
still to come, and at the end it lacks samples to fill its batches with. So a part of a window is planned first, without
being counted, and counting ends before the window cannot be filled any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from benchmarks.figures.common import Result
from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Planner, PlanRequest
from lightning_dcp.planners.protocol import DrawingPlanner
from lightning_dcp.simulate import Cluster, for_dataset
from lightning_dcp.simulate.stream import Stream, Window

_WINDOWS, _SKIPPED = 3, 4
"""Samples of a dataset for a drawing planner, in windows; and the part of a window after which idle ratios stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Steps of a planner.

    Attributes:
        steps: how many.
        samples_per_step: on average.
        seconds_per_step: makespan and what ends a step, on average.
        idle_ratio: share of ``W * makespan`` in which ranks wait.
        useful_ratio: rank-time of the samples' own work (:meth:`CostModel.useful_time`: no recompute, exchange or
            padding) over ``W`` times all seconds. Unlike tokens per second it hardly depends on which samples, short
            or long, stand in the steps that are counted.
    """

    steps: int
    samples_per_step: float
    seconds_per_step: float
    idle_ratio: float
    useful_ratio: float

    def as_json(self) -> Result:
        """The attributes."""
        return asdict(self)


def steady(
    draw: Callable[[int], IntArray], cluster: Cluster, planner: Planner, *, steps: int, batch: int, seed: int
) -> Steady:
    """Steps in the middle of an epoch.

    Args:
        draw: shapes of a dataset of so many samples.
        cluster: what it runs on.
        planner: any.
        steps: most steps that are counted.
        batch: samples of a step; not for planners that draw.
        seed: seed of the permutation.
    """
    draws = isinstance(planner, DrawingPlanner)
    width = planner.lookahead(cluster.world) if isinstance(planner, DrawingPlanner) else batch
    shapes = draw(width * (_WINDOWS if draws else steps))
    useful = cluster.cost.useful_time(shapes.prod(axis=1))
    world_size, sync = cluster.world.world_size, cluster.cost.profile.sync_time
    samples = worked = paid = work = count = 0
    plans = _plans(shapes, cluster, for_dataset(planner, shapes), width, seed)
    for plan, trained in islice(plans, steps):
        samples, count = samples + len(trained), count + 1
        worked += sum(m.nanoseconds * m.sp_size for m in plan.micro_batches)
        paid += world_size * plan.makespan
        work += int(useful[trained].sum())
    return Steady(
        steps=count,
        samples_per_step=samples / count,
        seconds_per_step=(paid / world_size / count + sync) / 1e9,
        idle_ratio=1 - worked / paid,
        useful_ratio=work / (paid + world_size * count * sync),
    )


def _plans(
    shapes: IntArray, cluster: Cluster, planner: Planner, width: int, seed: int
) -> Iterator[tuple[IterationPlan, IntArray]]:
    """Plans that count, with the samples that they hold."""
    window = Window(Stream(len(shapes), len(shapes), seed), width)
    skipped = width // _SKIPPED if planner.draws else 0
    while len(offered := window.offer()) == width:
        request = PlanRequest(
            sample_ids=offered,
            shapes=shapes[offered],
            cost=cluster.cost,
            world=cluster.world,
            limits=cluster.limits,
        )
        plan = planner.plan(request)
        trained = np.asarray(plan.sample_ids, dtype=np.int64)
        window.remove(trained)
        if skipped <= 0:
            yield plan, trained
        skipped -= len(trained)
