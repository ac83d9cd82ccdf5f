"""From planned steps to batches: what is read ahead, and in which order it comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from lightning_dcp.cost import IntArray
from lightning_dcp.data.planning import PlanningContext, plan_step, samples_of
from lightning_dcp.data.reading import Task
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import Planner
from lightning_dcp.topology import World


class Planned(NamedTuple):
    """A step whose data is on its way, or the error that planning it ended with."""

    epoch: int
    step: int
    plan: IterationPlan | None
    mine: tuple[MicroBatch, ...]
    error: Exception | None


def tasks(
    context: PlanningContext, sampler: StepSampler, shapes: IntArray, planned: deque[Planned]
) -> Iterator[Task]:
    """Plan the rest of the epoch step after step; each plan waits in ``planned`` for its data.

    Args:
        context: planner and what it needs.
        sampler: where to start, and the steps or what they are drawn from.
        shapes: shapes of all samples of the dataset, ``[n, axes]``.
        planned: where the plans are put.
    """
    epoch, first = sampler.begin()
    plans = (_drawn if sampler.drawing else _fixed)(context, sampler, shapes)
    for step in count(first):
        try:
            plan = next(plans, None)
            if plan is None:
                return
            mine = plan.of_rank(context.rank)
        except Exception as error:
            # Raised when the step's turn comes, so the steps before it still train.
            planned.append(Planned(epoch, step, None, (), error))
            yield Task(epoch, step, ())
            return
        planned.append(Planned(epoch, step, plan, mine, None))
        yield Task(epoch, step, mine)


def _fixed(context: PlanningContext, sampler: StepSampler, shapes: IntArray) -> Iterator[IterationPlan]:
    for ids in sampler:
        yield plan_step(context, ids, shapes)


def _drawn(context: PlanningContext, sampler: StepSampler, shapes: IntArray) -> Iterator[IterationPlan]:
    lookahead = lookahead_of(context.planner, context.world)
    draw = sampler.draw()
    while draw.left:
        plan = plan_step(context, draw.offer(lookahead), shapes)
        draw.take(samples_of(plan))
        yield plan


def lookahead_of(planner: Planner, world: World) -> int:
    """Samples that a planner wants to be offered.

    Raises:
        ValueError: it does not say, or it is no integer from 1.
    """
    ask = getattr(planner, "lookahead", None)
    wanted = ask(world) if callable(ask) else None
    if type(wanted) is not int or wanted < 1:
        raise ValueError(
            f'planner "{planner.name}" draws the samples of a step by itself, and wants {wanted!r} samples to choose '
            "from; lookahead(world) must return an integer from 1"
        )
    return wanted
