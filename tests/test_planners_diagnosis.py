"""Every cause of a gap is named by the step that has it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_dcp.cost import CostModel
from lightning_dcp.metrics import GapWatch
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners import Balanced, PlanRequest, Static, lower_bound
from lightning_dcp.planners.assembly import Placement, assemble
from lightning_dcp.planners.bound import padded_lower_bound
from lightning_dcp.planners.diagnosis import diagnose
from lightning_dcp.topology import World
from tests.planning_tools import COST, MiB, request, texts


def _alone(asked: PlanRequest) -> PlanRequest:
    """Only groups of one rank."""
    return replace(asked, world=World.build(asked.world.world_size, [1]))


def _said(asked: PlanRequest, plan: IterationPlan) -> str:
    assert plan.gap > 0.05, f"a gap of {plan.gap:.1%} needs no cause"
    return diagnose(asked, plan)


def _lengths(count: int, low: int, high: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def test_too_few_samples() -> None:
    asked = _alone(request(texts(*[1000] * 5), 4))
    said = _said(asked, Balanced().plan(asked))
    assert said.startswith("too few samples in a step: 5 samples on 4 ranks make 0.8 micro-batches per rank")


def test_few_samples_of_the_same_length_dominate_nothing() -> None:
    asked = _alone(request(texts(*[4000] * 6), 4))
    assert _said(asked, Balanced().plan(asked)).startswith("too few samples")


def test_one_sample_dominates() -> None:
    asked = _alone(request(texts(*[400] * 60, 9000), 4, memory=4000 * MiB))
    plan = assemble(
        asked,
        [Placement((60,), 0, 1), *(Placement((i,), 1 + i % 3, 1) for i in range(60))],
        lower_bound=lower_bound(asked),
    )
    wide = replace(asked, world=World.build(4, [1, 2, 4]))
    plan = replace(plan, lower_bound=lower_bound(wide))
    said = _said(wide, plan)
    assert said.startswith("one sample dominates: sample 70 of 9000 tokens alone takes 100% of the step on 1 of 4")
    assert "sp_sizes" in said


def test_memory() -> None:
    """Only groups of two or four ranks hold the long samples, and cost more than those of one; here for all samples."""
    lengths = [6000] * 9 + [500] * 30
    need = COST.bytes(1, (6000,), 4, (4,))
    asked = request(texts(*lengths), 4, memory=need * 3 // 2)
    roomy = replace(asked, limits=replace(asked.limits, memory_bytes=2**40))
    assert lower_bound(roomy) < 0.9 * lower_bound(asked)
    plan = Static(sp_size=4).plan(asked)
    assert _said(asked, plan).startswith("memory: without the limit of ")
    assert not _said(roomy, replace(plan, lower_bound=lower_bound(roomy))).startswith("memory")


def test_padding() -> None:
    asked = _alone(request(texts(*[50, 2000] * 40), 4))
    mixed = [Placement((2 * k, 2 * k + 1), k % 4, 1) for k in range(40)]
    plan = assemble(asked, mixed, lower_bound(asked))
    assert _said(asked, plan).startswith("padding: ")
    apart = [Placement((i, i + 2), 0, 1) for i in range(80) if i % 4 < 2]
    assert not _said(asked, assemble(asked, apart, lower_bound(asked))).startswith("padding")


def test_padding_that_no_plan_avoids() -> None:
    """The planner weighs batches against padding, so neither alone is the largest part of the gap."""
    asked = _alone(request(texts(*range(100, 1300, 50)), 2))
    plan = replace(Balanced().plan(asked), lower_bound=lower_bound(asked))
    said = _said(asked, plan)
    assert said.startswith("padding: ")
    nearest = padded_lower_bound(asked) / lower_bound(asked) - 1
    assert f"no plan that pads them comes nearer to the bound than {nearest:.0%}" in said


def test_least_accumulation() -> None:
    shapes = texts(*_lengths(64, 10, 30))
    asked = _alone(request(shapes, 4, min_micro_batches=8))
    plan = Balanced().plan(asked)
    said = _said(asked, plan)
    assert said.startswith("G_min: min_micro_batches=8 cuts the step into micro-batches of ")
    # Without the limit the same plan is some planner's choice.
    assert not _said(_alone(request(shapes, 4)), plan).startswith("G_min")


def test_the_planner_itself() -> None:
    asked = _alone(request(texts(*_lengths(200, 10, 30)), 4))
    plan = replace(Static().plan(asked), lower_bound=lower_bound(asked))
    said = _said(asked, plan)
    assert said.startswith("the planner: its micro-batches cost more than they have to")
    assert "planner='balanced'" in said


def test_a_plan_without_a_bound_is_explained_by_the_bound_of_its_samples() -> None:
    asked = _alone(request(texts(*[1000] * 5), 4))
    plan = Balanced().plan(asked)
    assert diagnose(asked, replace(plan, lower_bound=0)) == diagnose(asked, plan)


def test_a_step_that_takes_no_time_has_no_gap() -> None:
    """No samples; or samples so short that their time is rounded to nothing."""
    nothing = request([], 4)
    assert diagnose(nothing, Balanced().plan(nothing)).startswith("no time")
    none = tuple(
        replace(m, forward=(0,), backward=(0,), recompute=(0,), constant_time=0) for m in COST.profile.measurements
    )
    free = request(texts(*[5] * 9), 4, cost=CostModel(replace(COST.profile, measurements=none)))
    assert diagnose(free, Balanced().plan(free)).startswith("no time")


def test_a_bound_of_nothing_is_no_reason_to_fail() -> None:
    """The bound of short samples may be rounded to nothing where their batch takes time."""
    few = [(1, 1000, 500), (50, 1000, 25_000)]
    (one, *_) = COST.profile.measurements
    rows = tuple(
        replace(
            one, batch_size=b, shape=(s,), sp_size=1, forward=(t,), backward=(0,), recompute=(t,), constant_time=0
        )
        for b, s, t in few
    )
    asked = request(texts(*[1] * 50), 2, cost=CostModel(replace(COST.profile, num_layers=(1,), measurements=rows)))
    plan = Static(batch_size=25).plan(asked)
    assert lower_bound(asked) == 0 < plan.makespan
    assert diagnose(asked, plan).startswith(("too few samples", "padding", "the planner"))


@pytest.mark.parametrize("seed", range(8))
def test_always_a_sentence_and_always_the_same(seed: int) -> None:
    rng = random.Random(seed)
    asked = request(texts(*_lengths(rng.randint(1, 30), 1, 3000, seed)), rng.choice([1, 2, 4, 6]))
    plan = Balanced().plan(asked)
    said = diagnose(asked, plan)
    assert said == diagnose(asked, plan)
    causes = ("too few samples", "one sample dominates", "memory", "padding", "G_min", "the planner")
    assert said.startswith(causes)


def _gaps(*percents: int | None) -> list[IterationPlan]:
    """Plans of these gaps, or without a bound, the later ones longer."""
    plans = []
    for number, percent in enumerate(percents):
        bound = 1_000_000 * (number + 1)
        time = bound if percent is None else bound * (100 + percent) // 100
        row = MicroBatch(
            sample_ids=(0,), shapes=((1,),), padded_shape=(1,), first_rank=0, sp_size=1, nanoseconds=time, bytes=0
        )
        plans.append(
            IterationPlan(world_size=1, micro_batches=(row,), lower_bound=0 if percent is None else bound)
        )
    return plans


def _told(watch: GapWatch, plans: list[IterationPlan]) -> list[tuple[int, Any]]:
    found = [(step, watch.add(plan)) for step, plan in enumerate(plans)]
    return [(step, one[0]) for step, one in found if one is not None]


def test_a_gap_is_told_of_once_at_the_end_of_a_window() -> None:
    assert _told(GapWatch(), _gaps(*[10] * 19)) == []
    assert _told(GapWatch(), _gaps(*[10] * 100)) == [(19, pytest.approx(0.10))]


def test_windows_are_looked_at_one_by_one() -> None:
    """One bad step does not make a bad mean; a later window may be bad."""
    assert _told(GapWatch(), _gaps(*[4] * 19, 23, *[3] * 20)) == []
    assert _told(GapWatch(), _gaps(*[4] * 20, *[7] * 20)) == [(39, pytest.approx(0.07))]
    assert _told(GapWatch(), _gaps(*[0] * 10, *[12] * 10)) == [(19, pytest.approx(0.06))]


def test_plans_without_a_bound_do_not_count() -> None:
    assert _told(GapWatch(), _gaps(*[None] * 60)) == []
    assert _told(GapWatch(), _gaps(*[None, 8] * 20)) == [(39, pytest.approx(0.08))]


def test_the_plan_that_lost_most_is_explained() -> None:
    plans = _gaps(60, *[6] * 18, 1)
    told = [found for found in map(GapWatch().add, plans) if found is not None]
    # The 19th lasts 18 ms and lost 1.1 ms; the first lost more of its own time, but only 0.6 ms.
    assert told[0][1] is plans[18]
