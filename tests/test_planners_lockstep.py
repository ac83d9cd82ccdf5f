"""Plans in rounds, for engines that communicate in every micro-batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.balanced import Balanced
from lightning_dcp.planners.lockstep import plan_lockstep
from lightning_dcp.planners.protocol import InfeasibleError, PlanRequest
from tests.planning_tools import MiB, check, partitions, request, requests, texts
from tests.synthetic import analytic_profile


@settings(max_examples=80, deadline=None)
@given(asked=requests())
def test_every_plan_keeps_the_rules(asked: PlanRequest) -> None:
    try:
        plan = plan_lockstep(asked)
    except InfeasibleError:
        return
    assert plan.lockstep
    queues = [plan.of_rank(rank) for rank in range(plan.world_size)]
    longest = [max(q[k].nanoseconds for q in queues if k < len(q)) for k in range(max(map(len, queues)))]
    assert plan.makespan == sum(longest)
    check(plan, asked)


@settings(max_examples=30, deadline=None)
@given(asked=requests(worlds=(4,), max_samples=12))
def test_the_plan_does_not_depend_on_the_order_of_the_samples(asked: PlanRequest) -> None:
    try:
        plan = plan_lockstep(asked)
    except InfeasibleError:
        return
    mixed = replace(asked, sample_ids=asked.sample_ids[::-1], shapes=asked.shapes[::-1])
    assert plan_lockstep(mixed) == plan


def least_sum_of_rounds(asked: PlanRequest) -> int:
    """Over all ways to cut the samples into micro-batches of one rank each; sorted rounds are best for each."""
    best = []
    for parts in partitions(range(len(asked.shapes))):
        times = []
        for part in parts:
            longest = max(asked.sizes[i][0] for i in part)
            times.append(asked.cost.nanoseconds(len(part), (longest,), 1, (0,)))
        best.append(sum(sorted(times, reverse=True)[:: asked.world.world_size]))
    return min(best)


def test_near_the_least_sum_of_rounds_of_small_steps() -> None:
    rng = np.random.default_rng(2)
    cost = CostModel(analytic_profile((1,)))
    ratios = []
    for _ in range(25):
        lengths = rng.lognormal(6, 1, 6).astype(int).clip(8).tolist()
        asked = request(texts(*lengths), int(rng.integers(1, 5)), cost=cost, memory=10_000 * MiB)
        ratios.append(plan_lockstep(asked).makespan / least_sum_of_rounds(asked))
    assert min(ratios) >= 1
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.5


def test_better_in_rounds_than_a_plan_made_for_free_ranks() -> None:
    rng = np.random.default_rng(4)
    gains = []
    for _ in range(20):
        asked = request(texts(*rng.lognormal(6, 1.2, 48).astype(int).clip(8).tolist()), 8, memory=10_000 * MiB)
        free = replace(Balanced().plan(asked), lockstep=True)
        gains.append(free.makespan / plan_lockstep(asked).makespan)
    assert np.mean(gains) > 1.1


def test_long_micro_batches_meet_in_the_same_round() -> None:
    asked = request(texts(2000, 2000, 2000, 2000, 10, 10, 10, 10), 4, memory=10_000 * MiB, max_batch_size=1)
    plan = plan_lockstep(asked)
    for order in permutations(range(4), 2):
        assert plan.of_rank(order[0])[0].shapes == plan.of_rank(order[1])[0].shapes == ((2000,),)
    assert plan.idle_ratio == 0


def test_an_empty_step_and_packing() -> None:
    assert plan_lockstep(request([], 4)) == IterationPlan(world_size=4, micro_batches=(), lockstep=True)
    with pytest.raises(ValueError, match="packing=True is not possible with lockstep=True"):
        plan_lockstep(request(texts(8), 4, packing=True))
