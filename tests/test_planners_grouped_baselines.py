"""The paper's baselines: bucket matches times by batch size, packed fills rows; both with their best fixed settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import InfeasibleError, PlanRequest
from lightning_dcp.planners.grouped import Bucket, PackedBaseline
from lightning_dcp.planners.grouped.base import Drawing
from lightning_dcp.planners.grouped.groups import Groups, with_policy
from lightning_dcp.planners.grouped.rows import fill, first_fit, largest_budget
from lightning_dcp.planners.grouped.tuning import best_buckets
from lightning_dcp.topology import World
from tests.planning_tools import COST, COST_2D, MiB, check, request, texts
from tests.synthetic import analytic_profile
from tests.test_planners_grouped import epoch, lengths

SYNC = CostModel(replace(analytic_profile((1, 2, 4), (4,)), sync_time=5_000_000))


def settled(asked: PlanRequest) -> tuple[PlanRequest, Groups]:
    asked = with_policy(asked, "full")
    return asked, Groups.build(asked, asked.world.sp_sizes, None, 64)


def seconds(planner: Drawing, asked: PlanRequest, window: int) -> int:
    """Nanoseconds of an epoch, the ends of its steps included."""
    plans = [plan for plan, _ in epoch(planner, asked, window)]
    return sum(plan.makespan for plan in plans) + len(plans) * asked.cost.profile.sync_time


# Bucket


@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_bucket_has_one_size_and_one_batch_for_each_group(world_size: int) -> None:
    asked = request(texts(*lengths(1500)), world_size, memory=30 * MiB)
    plan = Bucket().plan(asked)
    check(plan, asked, drawn=True)
    (p,) = {m.sp_size for m in plan.micro_batches}
    assert sorted(m.first_rank for m in plan.micro_batches) == [first for first, _ in asked.world.blocks_of(p)]
    assert {m.recompute for m in plan.micro_batches} == {(4,)}
    assert {m.recompute for m in Bucket(recompute="auto").plan(asked).micro_batches} != {(4,)}


def test_batch_sizes_are_the_largest_that_match_the_slowest() -> None:
    asked, groups = settled(request(texts(*lengths(1500)), 4, memory=60 * MiB))
    found = best_buckets(asked, groups, (1, 2, 4), False)
    p, cost = found.sp_size, asked.cost
    alone = [cost.nanoseconds(1, (-(-s // p) * p,), p, (4,)) for (s,) in groups.sizes.tolist()]
    assert found.target >= max(alone)
    lowered = 0
    rows = zip(
        groups.sizes.tolist(), groups.counts.tolist(), found.batch_sizes.tolist(), found.nanoseconds, strict=True
    )
    for (s,), count, b, time in rows:
        padded = (max(-(-s // p) * p, 2 * p if p > 1 else 1),)
        assert time == cost.nanoseconds(b, padded, p, (4,)) <= found.target
        fits = cost.bytes(b + 1, padded, p, (4,)) <= 60 * MiB
        assert b == count or not fits or cost.nanoseconds(b + 1, padded, p, (4,)) > found.target
        lowered += b < count and fits
    assert lowered > 4


def test_settings_are_judged_by_the_steps_that_they_make() -> None:
    asked, groups = settled(request(texts(*lengths(700)), 4, cost=SYNC, memory=60 * MiB))
    group, place = groups.places()
    for p in (1, 2, 4):
        found = best_buckets(asked, groups, (p,), True)
        parallel, opened, seen = 4 // p, [], [0] * len(groups.counts)
        for i, k in enumerate(group.tolist()):
            assert place[i] == seen[k]
            if seen[k] % found.batch_sizes[k] == 0:
                opened.append(int(found.nanoseconds[k]))
            seen[k] += 1
        steps = [opened[start : start + parallel] for start in range(0, len(opened), parallel)]
        assert found.cost == (sum(max(step) + 5_000_000 for step in steps), int(asked.shapes.sum()))
    # Of all sizes the one of least time is chosen.
    costs = {p: best_buckets(asked, groups, (p,), True).cost[0] for p in (1, 2, 4)}
    best = best_buckets(asked, groups, (1, 2, 4), True)
    assert best.cost[0] == min(costs.values()) == costs[best.sp_size]


def test_the_prediction_in_the_middle_of_an_epoch_is_that_of_a_long_run() -> None:
    asked = request(texts(*lengths(6000)), 4, cost=SYNC, memory=30 * MiB)
    planner = Bucket(sp_size=1, window=1500, certify=False)
    first, groups = settled(replace(asked, sample_ids=asked.sample_ids[:1500], shapes=asked.shapes[:1500]))
    time, tokens = best_buckets(first, groups, (1,), False).cost
    assert time / tokens == pytest.approx(seconds(planner, asked, 1500) / int(asked.shapes.sum()), rel=0.1)


def test_the_chosen_size_is_about_as_good_as_the_best_fixed_one() -> None:
    asked = request(texts(*lengths(2000)), 4, cost=SYNC, memory=30 * MiB)
    fixed = []
    for p in (1, 2, 4):
        try:
            fixed.append(seconds(Bucket(sp_size=p, window=1000, certify=False), asked, 1000))
        except InfeasibleError:
            assert COST.bytes(1, (3000,), p, (4,)) > 30 * MiB
    assert seconds(Bucket(window=1000, certify=False), asked, 1000) <= 1.06 * min(fixed)


def test_bucket_fits_the_longest_sample_and_the_longest_edge() -> None:
    memory = COST.bytes(1, (3000,), 4, (4,))
    short, long = request(texts(5, 6, 70), 4, memory=memory), request(texts(5, 3000, 70), 4, memory=memory)
    assert {m.sp_size for m in Bucket().plan(long).micro_batches} == {4}
    assert {m.sp_size for m in Bucket().plan(short).micro_batches} != {4}
    assert {m.sp_size for m in Bucket(edges=[70, 3000]).plan(short).micro_batches} == {4}
    # Also where the edge fits only with fewer recomputed layers.
    least = min(COST.bytes(1, (3000,), 4, (r,)) for r in range(5))
    assert least < memory
    short = replace(short, limits=replace(short.limits, memory_bytes=least))
    assert {m.sp_size for m in Bucket().plan(short).micro_batches} != {4}
    assert {m.sp_size for m in Bucket(edges=[70, 3000]).plan(short).micro_batches} == {4}
    # An edge that fits nowhere is no reason to refuse samples that fit.
    check(Bucket(edges=[70, 10**6]).plan(short), short, drawn=True)
    with pytest.raises(InfeasibleError, match="sample 11 of shape"):
        Bucket(sp_size=2).plan(long)


def test_ranks_outside_the_groups_of_the_size_idle() -> None:
    asked = replace(request(texts(*lengths(300)), 6, memory=400 * MiB), world=World.build(6, [1, 2, 4]))
    plan = Bucket(sp_size=4).plan(asked)
    check(plan, asked, drawn=True)
    assert {m.first_rank for m in plan.micro_batches} == {0}
    assert plan.of_rank(5) == ()


def test_samples_that_have_no_size_in_common_are_refused_by_bucket_alone() -> None:
    need = max(COST_2D.bytes(1, (30, 32), 2, (1, 2)), COST_2D.bytes(1, (27, 32), 3, (1, 2)))
    asked = request(
        [(30, 32), (27, 32), (32, 32)], 4, cost=COST_2D, memory=need, exact_shapes=True, recompute="full"
    )
    asked = replace(asked, world=World.build(4, [1, 2]))
    assert COST_2D.bytes(1, (27, 32), 1, (1, 2)) > need
    with pytest.raises(InfeasibleError, match="sample 11"):
        Bucket().plan(asked)
    asked = request([(32, 32), (27, 32)], 6, cost=COST_2D, memory=need, exact_shapes=True, recompute="full")
    asked = replace(asked, world=World.build(6, [1, 2, 3, 6]))
    with pytest.raises(InfeasibleError, match="none of .* fits all of the 2 samples"):
        Bucket().plan(asked)


def test_g_min_of_the_baselines() -> None:
    asked = request(texts(*lengths(3000)), 4, memory=400 * MiB, min_micro_batches=3)
    plan = Bucket(length_groups=4).plan(asked)
    assert {len(plan.of_rank(rank)) for rank in range(4)} == {3}
    packing = replace(asked, limits=replace(asked.limits, packing=True))
    for planner in (PackedBaseline(), PackedBaseline(rows=2), PackedBaseline(rows=5)):
        plan = planner.plan(packing)
        assert {len(plan.of_rank(rank)) for rank in range(4)} == {max(planner.rows, 3)}


# Packed


def packing(asked: PlanRequest, **limits: Any) -> PlanRequest:
    return replace(asked, limits=replace(asked.limits, packing=True, **limits))


def naive_first_fit(sizes: IntArray, budget: int, count: int, most: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    for i, size in enumerate(sizes.tolist()):
        for row in rows:
            if len(row) < most and sum(int(sizes[k]) for k in row) + size <= budget:
                row.append(i)
                break
    return [row for row in rows if row]


def test_rows_are_filled_by_first_fit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 40, int(rng.integers(1, 80)))
        budget = int(sizes.max()) + int(rng.integers(0, 100))
        count, most = int(rng.integers(1, 12)), int(rng.choice([1, 3, 1000]))
        found = [row.tolist() for row in first_fit(sizes, budget, count, most)]
        assert found == naive_first_fit(sizes, budget, count, most)


def test_a_row_takes_as_much_of_the_window_as_the_memory_holds() -> None:
    asked = with_policy(packing(request(texts(*lengths(1500)), 4, memory=30 * MiB)), "full")
    for p in (2, 4):
        budget = largest_budget(asked, p)
        rows = fill(asked, p, budget, 8)
        assert (rows.settings.bytes <= 30 * MiB).all()
        filled = rows.tokens / len(rows.members)
        assert filled > 0.97 * budget
        assert rows.settings.bytes.mean() > 0.95 * 30 * MiB
        assert rows.tokens == sum(int(asked.shapes[row].sum()) for row in rows.members)


def test_a_row_of_other_lengths_than_the_window_stays_within_the_memory() -> None:
    # Short samples first: they hold more for each token than the long ones, by which the budget is chosen.
    asked = with_policy(packing(request(texts(*[1] * 3000, *[2500] * 50), 1, memory=40 * MiB)), "full")
    rows = fill(asked, 1, 3000, 1)
    assert rows.settings.bytes.max() <= 40 * MiB
    plan = PackedBaseline(sp_size=1).plan(asked)
    check(plan, asked, drawn=True)


def test_packed_has_one_size_and_so_many_rows_for_each_group() -> None:
    asked = packing(request(texts(*lengths(3000)), 4, memory=30 * MiB))
    for count in (1, 3):
        plan = PackedBaseline(rows=count).plan(asked)
        check(plan, asked, drawn=True)
        (p,) = {m.sp_size for m in plan.micro_batches}
        assert {len(plan.of_rank(rank)) for rank in range(4)} == {count}
        assert len(plan.micro_batches) == count * len(asked.world.blocks_of(p))
        assert {m.recompute for m in plan.micro_batches} == {(4,)}


def test_a_given_budget_is_kept_unless_a_sample_is_longer() -> None:
    asked = packing(request(texts(*lengths(1000, longest=500)), 4, memory=400 * MiB))
    for p in (1, 4):
        plan = PackedBaseline(sp_size=p, budget=1001).plan(asked)
        assert max(m.padded_shape[0] for m in plan.micro_batches) <= 1001 // p * p
        assert sum(m.num_tokens for m in plan.micro_batches) > 0.95 * 1000 * len(plan.micro_batches)
        check(plan, asked, drawn=True)
    long = packing(request(texts(100, 1777, 100), 4, memory=400 * MiB))
    steps = [plan for plan, _ in epoch(PackedBaseline(budget=200), long, 3)]
    assert sum(plan.num_samples for plan in steps) == 3


def test_limits_of_samples_and_tokens_hold_for_rows() -> None:
    base = request(texts(*lengths(1000, longest=500)), 4, memory=400 * MiB)
    for limits in ({"max_batch_size": 3}, {"max_tokens": 500}, {"max_batch_size": 1, "max_tokens": 125}):
        asked = packing(base, **limits)
        plan = PackedBaseline().plan(asked)
        check(plan, asked, drawn=True)
        if "max_batch_size" in limits:
            assert max(m.batch_size for m in plan.micro_batches) == limits["max_batch_size"]


def test_the_chosen_rows_are_about_as_good_as_the_best_fixed_ones() -> None:
    asked = packing(request(texts(*lengths(900)), 4, cost=SYNC, memory=30 * MiB))
    fixed = []
    for p in (1, 2, 4):
        for budget in (3000, 4500, 9000, 18000, 10**6):
            try:
                fixed.append(seconds(PackedBaseline(sp_size=p, budget=budget, certify=False), asked, 900))
            except InfeasibleError:
                assert p < 4
    assert seconds(PackedBaseline(certify=False), asked, 900) <= 1.05 * min(fixed)


def test_the_last_rows_of_an_epoch_are_spread_over_the_ranks() -> None:
    asked = packing(request(texts(*[100] * 16), 4, memory=400 * MiB))
    plan = PackedBaseline().plan(asked)
    assert plan.num_samples == 16
    assert plan.idle_ratio < 0.01


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(texts(5), 2), "packing=False"),
        (packing(request([(5, 4)], 2, cost=COST_2D)), "one axis"),
        (packing(request(texts(5), 2), exact_shapes=True), "exact_shapes"),
    ],
)
def test_what_cannot_be_packed_is_refused(asked: PlanRequest, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackedBaseline().plan(asked)


@pytest.mark.parametrize("planner", [Bucket(sp_size=3), PackedBaseline(sp_size=3)])
def test_a_size_that_the_world_has_not_is_refused(planner: Drawing) -> None:
    asked = replace(request(texts(5, 6), 4), world=World.build(4, [1, 2, 4]))
    if isinstance(planner, PackedBaseline):
        asked = packing(asked)
    with pytest.raises(ValueError, match=r"sp_size=3 is not possible here; allowed are \(1, 2, 4\)"):
        planned(planner, asked)


def planned(planner: Drawing, asked: PlanRequest) -> IterationPlan:
    assert isinstance(planner, Bucket | PackedBaseline)
    return planner.plan(asked)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Bucket, {"sp_size": 0}, "sp_size=0"),
        (Bucket, {"recompute": "some"}, "recompute='some'"),
        (PackedBaseline, {"budget": 0}, "budget=0"),
        (PackedBaseline, {"rows": 0}, "rows=0"),
        (PackedBaseline, {"sp_size": -1}, "sp_size=-1"),
        (PackedBaseline, {"recompute": "some"}, "recompute='some'"),
    ],
)
def test_wrong_options_are_refused(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)
