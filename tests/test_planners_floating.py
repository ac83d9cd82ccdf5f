"""Floating steps: a prefix of the offered samples, chosen by useful work per time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.cost import CostModel
from lightning_dcp.lengths import length_groups
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.adapting import for_dataset
from lightning_dcp.planners.balanced import Balanced
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped import DCPIntra
from lightning_dcp.planners.protocol import DrawingPlanner, InfeasibleError, PlanRequest
from lightning_dcp.planners.static import Static
from tests.planning_tools import MiB, request, requests, texts
from tests.synthetic import analytic_profile


def prefix(asked: PlanRequest, count: int) -> PlanRequest:
    return replace(asked, sample_ids=asked.sample_ids[:count], shapes=asked.shapes[:count])


def work_per_time(plan: IterationPlan, asked: PlanRequest) -> float:
    work = asked.cost.useful_time(asked.shapes[: plan.num_samples].prod(axis=1)).sum()
    return float(work) / (plan.makespan + asked.cost.profile.sync_time)


@settings(max_examples=40, deadline=None)
@given(asked=requests(), least=st.integers(1, 10), more=st.integers(0, 12))
def test_the_plan_is_that_of_a_prefix_within_the_bounds(asked: PlanRequest, least: int, more: int) -> None:
    planner = Floating(min_samples=least, max_samples=least + more, candidates=3)
    assert isinstance(planner, DrawingPlanner)
    try:
        plan = planner.plan(asked)
    except InfeasibleError:
        return
    assert plan == Balanced().plan(prefix(asked, plan.num_samples))
    assert min(least, len(asked.ids)) <= plan.num_samples <= least + more


def test_of_the_candidates_the_one_of_most_useful_work_per_time_is_taken() -> None:
    rng = np.random.default_rng(3)
    cost = CostModel(replace(analytic_profile((1, 2, 4)), sync_time=100_000))
    chosen = set()
    for _ in range(12):
        asked = request(texts(*rng.integers(10, 16_000, 30).tolist()), 4, cost=cost, memory=10_000 * MiB)
        planner = Floating(min_samples=4, max_samples=20, candidates=4)
        plan = planner.plan(asked)
        counts = [round(4 * 5 ** (k / 3)) for k in range(4)]
        rates = [work_per_time(Balanced().plan(prefix(asked, n)), asked) for n in counts]
        assert work_per_time(plan, asked) == pytest.approx(max(rates))
        chosen.add(plan.num_samples)
    assert len(chosen) > 1, "else N would not follow the data"


def test_a_dear_end_of_the_step_asks_for_more_samples() -> None:
    """Four equal samples fill the ranks; those behind them are one too many for any number of rounds."""
    shapes = texts(*[3000] * 4, *np.random.default_rng(5).integers(10, 3000, 56).tolist())

    def samples(sync_time: int) -> int:
        cost = CostModel(replace(analytic_profile((1, 2, 4)), sync_time=sync_time))
        return Floating(min_samples=4, max_samples=48).plan(request(shapes, 4, cost=cost)).num_samples

    assert samples(10**12) == 48 > samples(0)


@pytest.mark.parametrize(
    ("least", "most", "candidates"), [(4, 48, 8), (1, 7, 8), (3, 3, 2), (100, 10**6, 30), (1, 10**9, 40)]
)
def test_candidates_are_rounded_points_of_a_geometric_series(least: int, most: int, candidates: int) -> None:
    """Exact: 2 c - 1 and 2 c + 1 are on either side of twice the point, whose power is an integer."""
    found = Floating(min_samples=least, max_samples=most, candidates=candidates)._counts(10**12, 10**12)
    last = candidates - 1
    wanted = set()
    for k in range(candidates):
        power = 2**last * least ** (last - k) * most**k
        near = round(least ** (1 - k / last) * most ** (k / last))
        span = range(max(near - 2 - near // 10**9, 1), near + 3 + near // 10**9)
        wanted.add(next(c for c in span if (2 * c - 1) ** last <= power < (2 * c + 1) ** last))
    assert found == sorted(wanted, reverse=True)


def test_candidates_are_found_without_floating_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """``geomspace`` calls the machine's logarithm and power, which may differ in the last bit."""
    monkeypatch.setattr(np, "geomspace", None)
    asked = request(texts(*[100] * 30), 4)
    assert Floating(min_samples=4, max_samples=16).plan(asked).num_samples >= 4


def test_a_step_without_samples_has_an_empty_plan() -> None:
    plan = Floating(min_samples=4, max_samples=16).plan(request([], 4))
    assert plan == Balanced().plan(request([], 4))
    assert not plan.micro_batches


def test_an_epoch_is_drained_in_order_without_a_tiny_last_step() -> None:
    rng = np.random.default_rng(7)
    for total in (1, 3, 8, 9, 17, 30, 41):
        whole = request(texts(*rng.integers(10, 2000, total).tolist()), 2, memory=10_000 * MiB)
        planner, done, steps = Floating(min_samples=4, max_samples=16), 0, []
        while done < total:
            end = min(done + planner.lookahead(whole.world), total)
            offered = replace(whole, sample_ids=whole.sample_ids[done:end], shapes=whole.shapes[done:end])
            plan = planner.plan(offered)
            trained = sorted(i for m in plan.micro_batches for i in m.sample_ids)
            assert trained == list(range(10 + done, 10 + done + len(trained)))
            steps.append(len(trained))
            done += len(trained)
        assert sum(steps) == total
        assert min(steps) >= min(4, total)
        assert max(steps) <= 16


def test_samples_per_time_would_end_steps_before_long_samples() -> None:
    """Why useful work decides and not the number of samples: what follows an end would be longer than other samples."""
    rng = np.random.default_rng(11)
    cost = CostModel(analytic_profile((1, 2, 4)))
    first_by_work, first_by_samples, everything = [], [], []
    for _ in range(60):
        lengths = np.clip(rng.lognormal(5.5, 1.2, 24), 8, 16_000).astype(int).tolist()
        asked = request(texts(*lengths), 4, cost=cost, memory=10_000 * MiB)
        plans = [Static().plan(prefix(asked, n)) for n in range(8, 16)]
        rates = [n / plan.makespan for n, plan in zip(range(8, 16), plans, strict=True)]
        first_by_samples.append(lengths[8 + int(np.argmax(rates))])
        first_by_work.append(lengths[8 + int(np.argmax([work_per_time(plan, asked) for plan in plans]))])
        everything += lengths
    usual = float(np.mean(np.log(everything)))
    error = float(np.std(np.log(everything)) / np.sqrt(60))
    assert np.mean(np.log(first_by_samples)) - usual > 4 * error
    assert abs(np.mean(np.log(first_by_work)) - usual) < 4 * error


@pytest.mark.parametrize(
    ("least", "most", "candidates", "message"),
    [
        (0, 4, 2, "min_samples=0"),
        (5, 4, 2, "min_samples <= max_samples"),
        (1, 4, 1, "candidates=1; allowed are integers from 2"),
    ],
)
def test_wrong_bounds_are_refused(least: int, most: int, candidates: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Floating(min_samples=least, max_samples=most, candidates=candidates)


def test_a_planner_that_draws_is_refused() -> None:
    inner = Floating(min_samples=1, max_samples=2)
    with pytest.raises(ValueError, match='"floating" draws the samples of a step by itself'):
        Floating(min_samples=1, max_samples=2, planner=inner)


def test_bounds_that_are_not_given_come_from_the_run() -> None:
    asked = request(texts(*[100] * 30), 4)
    open_bounds = Floating()
    for act in (lambda: open_bounds.plan(asked), lambda: open_bounds.lookahead(asked.world)):
        with pytest.raises(ValueError, match="how many samples a step may have is not said"):
            act()
    around = for_dataset(open_bounds, asked.shapes, 8)
    assert around == Floating(min_samples=4, max_samples=16)
    assert for_dataset(Floating(max_samples=3), asked.shapes, 8) == Floating(min_samples=3, max_samples=3)
    given = Floating(min_samples=2, max_samples=6)
    assert for_dataset(given, asked.shapes, 8) == given
    assert for_dataset(open_bounds, asked.shapes) is open_bounds


def test_grouped_planners_take_the_groups_of_the_whole_dataset() -> None:
    shapes = np.asarray([[10], [10], [500], [7000]])
    planner = for_dataset(DCPIntra(length_groups=2), shapes)
    assert isinstance(planner, DCPIntra)
    assert planner.edges == length_groups(shapes, 2)
    assert for_dataset(planner, shapes[:1]) is planner
    assert for_dataset(Balanced(), shapes, 8) == Balanced()
