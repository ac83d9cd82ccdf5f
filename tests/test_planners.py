"""What every planner of given samples must fulfil, and the lower bound against the optimum."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.cost import CostModel
from lightning_dcp.planners import (
    PLANNERS,
    Balanced,
    InfeasibleError,
    Limits,
    Planner,
    PlanRequest,
    Replay,
    Static,
    create,
    lower_bound,
)
from lightning_dcp.planners.assembly import Placement, raise_micro_batches
from lightning_dcp.planners.bound import padded_lower_bound
from lightning_dcp.planners.padded import ALL, Bounds
from lightning_dcp.planners.padded.menus import batch_sizes, shares_of
from lightning_dcp.planners.padded.pour import Item
from lightning_dcp.topology import World, legal_sp_sizes
from tests.planning_tools import COST, SIZES, MiB, check, optimum, request, requests, texts
from tests.synthetic import analytic_profile

ROOT = Path(__file__).parent.parent
PLANNED = (Balanced(), Static(), Static(batch_size=3), Static(batch_size=2, deal="in_order"))
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def feasible(asked: PlanRequest) -> bool:
    try:
        lower_bound(asked)
    except InfeasibleError:
        return False
    return True


# Every planner


@pytest.mark.parametrize("planner", PLANNED, ids=repr)
@slow
@given(asked=requests())
def test_every_plan_keeps_the_rules(planner: Planner, asked: PlanRequest) -> None:
    try:
        plan = planner.plan(asked)
    except InfeasibleError:
        # Balanced may use every size, so it refuses only what truly fits nowhere.
        single = replace(asked, world=World.build(1, (1,))) if isinstance(planner, Static) else asked
        assert not feasible(single)
        return
    check(plan, asked)
    assert planner.plan(asked).digest() == plan.digest()


@slow
@given(asked=requests())
def test_balanced_is_never_worse_than_single_samples_on_single_ranks(asked: PlanRequest) -> None:
    asked = replace(asked, limits=replace(asked.limits, min_micro_batches=1))
    try:
        control = Static().plan(asked)
    except InfeasibleError:
        return
    for moves in (0, 200):
        assert Balanced(max_moves=moves).plan(asked).makespan <= control.makespan


def test_single_samples_are_always_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a poor search the promise must still hold, so it cannot rest on the search's quality."""

    def poor(self: Any) -> tuple[int, list[Item]]:
        items = [Item(i, 1, 0, 1, 1) for i in range(len(self._kinds))]
        return 2**40, items

    monkeypatch.setattr("lightning_dcp.planners.padded.search._Search._poured", poor)
    rng = np.random.default_rng(0)
    for _ in range(20):
        asked = request(texts(*rng.integers(100, 1500, 7).tolist()), 4)
        assert Balanced(max_moves=0).plan(asked).makespan == Static().plan(asked).makespan


@slow
@given(asked=requests(), seed=st.randoms())
def test_balanced_does_not_depend_on_the_order_of_the_samples(asked: PlanRequest, seed: Any) -> None:
    if not feasible(asked):
        return
    order = list(range(len(asked.shapes)))
    seed.shuffle(order)
    mixed = replace(
        asked,
        sample_ids=asked.sample_ids[order],
        shapes=asked.shapes[order],
    )
    assert Balanced().plan(mixed) == Balanced().plan(asked)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("planner", PLANNED, ids=repr)
def test_world_sizes(planner: Planner, world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    asked = request(texts(*rng.integers(5, 2000, 30).tolist()), world_size)
    plan = planner.plan(asked)
    check(plan, asked)
    assert all(plan.of_rank(rank) for rank in range(world_size)), "thirty samples keep every rank busy"


@pytest.mark.parametrize("planner", [*PLANNED, Static(sp_size=2), Static(sp_size=4, batch_size=2)], ids=repr)
@pytest.mark.parametrize("count", range(1, 21))
def test_any_number_of_samples_is_feasible(planner: Planner, count: int) -> None:
    """radixark/miles#2197: a count that was no multiple of dp x group failed many steps into the run."""
    asked = request(texts(*[30 * k + 1 for k in range(count)]), 4)
    check(planner.plan(asked), asked)


def test_a_step_without_samples_is_an_empty_plan() -> None:
    for planner in (Balanced(), Static()):
        plan = planner.plan(request([], 2))
        assert (plan.micro_batches, plan.makespan, plan.lower_bound) == ((), 0, 0)


def test_plans_are_the_same_in_other_processes_hash_seeds_and_thread_counts() -> None:
    code = "from tests.test_planners import digests_of_some_plans; print(digests_of_some_plans())"
    found = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("4242", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    assert found == {str(digests_of_some_plans())}


def digests_of_some_plans() -> list[int]:
    found = []
    for world_size in (3, 8):
        lengths = np.random.default_rng(world_size).lognormal(5.5, 1.0, 40).astype(int) + 1
        asked = request(texts(*lengths.tolist()), world_size, memory=60 * MiB)
        found += [planner.plan(asked).digest() for planner in PLANNED]
    return found


# The lower bound


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=requests(worlds=(1, 2), max_samples=4))
def test_bound_optimum_and_makespan_in_order(asked: PlanRequest) -> None:
    asked = replace(asked, limits=replace(asked.limits, min_micro_batches=1))
    if not feasible(asked):
        return
    best = optimum(asked)
    plan = Balanced().plan(asked)
    assert lower_bound(asked) <= plan.lower_bound <= best <= plan.makespan
    assert lower_bound(asked) <= padded_lower_bound(asked) <= best


def test_bound_is_tight_where_nothing_is_lost() -> None:
    asked = request(texts(*[512] * 8), 4, max_batch_size=2)
    two = replace(asked, world=World.build(1, (1,)), sample_ids=asked.sample_ids[:2], shapes=asked.shapes[:2])
    assert lower_bound(asked) == optimum(two)
    assert Balanced().plan(asked).gap == 0.0


@pytest.mark.parametrize("batch_size", [19, 27, 39])
def test_any_batch_size_counts_and_is_found(batch_size: int) -> None:
    """Not all batch sizes are tabled; where the limit lies between two of them, both plan and bounds know it."""
    cost = CostModel(analytic_profile((1,), (4,), batch_sizes=(1, 64)))
    asked = request(texts(*[40] * 2 * batch_size), 1, cost=cost, max_tokens=40 * batch_size)
    assert batch_size not in batch_sizes(asked, 2 * batch_size)
    best = 2 * cost.nanoseconds(batch_size, (40,), 1, (0,))
    plan = Balanced().plan(asked)
    assert [m.batch_size for m in plan.micro_batches] == [batch_size] * 2
    assert plan.makespan == best
    # Rounded down for each sample, by less than the slack of each layer.
    for bound in (lower_bound(asked), plan.lower_bound, padded_lower_bound(asked)):
        assert 0 <= best - bound <= 2 * batch_size * 10


def test_bound_is_at_least_the_longest_sample_alone() -> None:
    asked = request(texts(4000, 10, 10), 4, memory=10_000 * MiB)
    fastest = min(COST.nanoseconds(1, (-(-4000 // p) * p,), p, (0,)) for p in asked.world.sp_sizes)
    assert lower_bound(asked) >= fastest
    assert (
        lower_bound(asked)
        >= lower_bound(replace(asked, shapes=asked.shapes[:1], sample_ids=asked.sample_ids[:1]))
        >= fastest
    )


def test_bound_counts_the_sample_with_its_own_length() -> None:
    """A bound by the group's edge, or with one shape in a micro-batch only, lies above mixed-length plans."""
    asked = request(texts(100, 101, 102, 103), 1)
    plan = Balanced().plan(asked)
    assert len(plan.micro_batches) == 1
    assert plan.lower_bound <= plan.makespan
    exact = Balanced().plan(replace(asked, limits=replace(asked.limits, exact_shapes=True)))
    assert len(exact.micro_batches) == 4
    assert exact.makespan > plan.makespan


def test_bound_falls_with_more_ranks_memory_and_freedom() -> None:
    lengths = texts(*np.random.default_rng(3).integers(100, 3000, 20).tolist())
    by_world = [lower_bound(request(lengths, w, memory=300 * MiB)) for w in (1, 2, 4, 8)]
    assert by_world == sorted(by_world, reverse=True)
    by_memory = [lower_bound(request(lengths, 4, memory=m * MiB)) for m in (60, 100, 300)]
    assert by_memory == sorted(by_memory, reverse=True)
    assert len(set(by_memory)) == 3
    assert lower_bound(request(lengths, 4, max_batch_size=1)) > lower_bound(request(lengths, 4))


def test_shares_by_brute_force() -> None:
    asked = request(texts(700, 50), 2, memory=40 * MiB, max_batch_size=6)
    bounds = Bounds.build(asked, ALL)
    table = shares_of(bounds.menus, bounds.alone.counts)
    cap = min(menu.cap for menu in bounds.menus)
    for makespan in (cap // 4, cap // 2, cap):
        for i, (length,) in enumerate(asked.sizes):
            options = []
            for p, b in ((p, b) for p in (1, 2) for b in range(1, 3)):
                padded = -(-length // p) * p
                found = COST.settings(p, np.asarray(b), np.asarray(padded), 40 * MiB)
                if int(found.nanoseconds) <= makespan:
                    options.append(p * int(found.nanoseconds) // b)
            assert int(table.least(makespan)[i]) == min(options, default=2**50)


# Feasibility and limits


def test_infeasible_names_sample_length_need_limit_and_ways_out() -> None:
    asked = request(texts(10, 9000, 20), 2, memory=20 * MiB)
    need = min(COST.bytes(1, (9000,), p, (r,)) for p in (1, 2) for r in range(5))
    for planner in (Balanced(), Static(sp_size=2), Static(batch_size=3)):
        with pytest.raises(InfeasibleError) as caught:
            planner.plan(asked)
        text = str(caught.value)
        for word in (
            "sample 11",
            "(9000,)",
            "9000 tokens",
            f"{20 * MiB} bytes",
            "sp_sizes",
            "recompute",
            "memory_limit",
        ):
            assert word in text
        if planner != Static(batch_size=3):
            assert f"at least {need} bytes" in text
        assert "recompute='auto'" not in text, "no advice to do what is done"
    for policy in ("none", "full"):
        other = replace(asked, limits=replace(asked.limits, recompute=policy))
        with pytest.raises(
            InfeasibleError, match=rf"recompute '{policy}'.* recompute='auto', a higher memory_limit"
        ):
            Balanced().plan(other)


def test_infeasible_by_max_tokens_says_so() -> None:
    with pytest.raises(
        InfeasibleError, match=r"sample 11 .*4500 tokens per rank at sp_size 2; max_tokens is 1000"
    ):
        Balanced().plan(request(texts(10, 9000), 2, memory=4000 * MiB, max_tokens=1000))


def test_long_samples_get_more_ranks_only_where_memory_asks_for_it() -> None:
    lengths = texts(6000, *[5000] * 7)
    memory = COST.bytes(1, (6000,), 1, (3,)) - 1
    assert memory > COST.bytes(1, (5000,), 1, (3,))
    widths = {m.padded_shape: m.sp_size for m in Balanced().plan(request(lengths, 4, memory=memory)).micro_batches}
    assert widths[(6000,)] > 1
    assert widths[(5000,)] == 1


@pytest.mark.parametrize("memory", [30 * MiB, 60 * MiB, 300 * MiB])
def test_memory_far_from_the_profiled_points(memory: int) -> None:
    """GMISWE/tinker-cloud#33: a token budget tied to the longest length let short samples exceed the memory."""
    profile = analytic_profile((1, 2, 4), (4,), shapes=((32,), (4096,)), batch_sizes=(1, 2))
    cost = CostModel(profile)
    rng = np.random.default_rng(0)
    for lengths in ([7] * 300, [33] * 200, [500] * 60, rng.integers(1, 1500, 100).tolist()):
        asked = request(texts(*lengths), 4, cost=cost, memory=memory)
        for planner in (Balanced(), Static(batch_size=64)):
            plan = planner.plan(asked)
            check(plan, asked)
            far = max(m.batch_size for m in plan.micro_batches) > 2
            assert far or isinstance(planner, Balanced), "beyond the profiled batch sizes"


@pytest.mark.parametrize("planner", [Balanced(), Static(batch_size=32)], ids=repr)
def test_caps_of_the_user(planner: Planner) -> None:
    """Lightning-AI/pytorch-lightning#11295: small models got absurd sizes until the memory ran out."""
    asked = request(texts(*[40] * 64), 2)
    assert max(m.batch_size for m in planner.plan(asked).micro_batches) >= 8
    fewer = replace(asked, limits=replace(asked.limits, max_batch_size=5))
    assert max(m.batch_size for m in planner.plan(fewer).micro_batches) <= 5
    tokens = replace(asked, limits=replace(asked.limits, max_tokens=130))
    plan = planner.plan(tokens)
    check(plan, tokens)
    assert max(m.padded_tokens for m in plan.micro_batches) <= 130


def test_with_exact_shapes_nothing_is_padded() -> None:
    """Not to a multiple of the group's size either: a model that minds padding minds that too."""
    long = (12001,)
    for length, exact, widest in ((12001, True, 1), (12001, False, 4), (12000, True, 4)):
        asked = request(texts(length), 4, memory=10_000 * MiB, exact_shapes=exact)
        plan = Balanced().plan(asked)
        check(plan, asked)
        assert [m.sp_size for m in plan.micro_batches] == [widest]
    memory = COST.bytes(1, long, 1, (3,)) - 1
    tight = request([long], 4, memory=memory, exact_shapes=True)
    with pytest.raises(InfeasibleError, match=rf"at least {memory + 1} bytes per rank \(sp_size 1"):
        Balanced().plan(tight)
    with pytest.raises(InfeasibleError, match=r"would be padded on \(4,\) ranks .* divide the first axis"):
        Static(sp_size=4).plan(request([long], 4, memory=10_000 * MiB, exact_shapes=True))


@pytest.mark.parametrize("max_tokens", [None, 2, 3, 5, 6])
def test_samples_shorter_than_their_group_are_tabled_as_they_are_padded(max_tokens: int | None) -> None:
    """A shard has two places or more, so 3 tokens on 4 ranks are 8 places; the lower bound counts 4."""
    rows = tuple(replace(m, constant_time=m.constant_time // m.sp_size**3) for m in COST.profile.measurements)
    rows = tuple(replace(m, forward=(1,), backward=(1,)) for m in rows if m.sp_size in (1, 4))
    cost = CostModel(replace(COST.profile, measurements=rows))
    asked = request(texts(*[3] * 8), 4, cost=cost, max_tokens=max_tokens)
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert {m.padded_shape for m in plan.micro_batches} == {(8,)}, "the wide group must pay for this to mean much"
    bounds = Bounds.build(asked, ALL)
    assert bounds.alone.tokens[4].tolist() == [4]
    assert int(bounds.menus[1].times[0, 0]) == cost.nanoseconds(1, (4,), 4, (0,))


def test_max_step_factor_changes_nothing_for_given_samples() -> None:
    asked = request(texts(100, 200, 300), 2)
    for planner in (Balanced(), Static()):
        assert planner.plan(replace(asked, limits=replace(asked.limits, max_step_factor=1.0))) == planner.plan(
            asked
        )


@pytest.mark.parametrize("planner", [Balanced(), Static(batch_size=8)], ids=repr)
def test_min_micro_batches(planner: Planner) -> None:
    """Appendix C: if every g is below G_min, all are multiplied by ceil(G_min / max g)."""
    asked = request(texts(*[40] * 16), 2)
    assert [len(planner.plan(asked).of_rank(r)) for r in (0, 1)] == [1, 1]
    more = replace(asked, limits=replace(asked.limits, min_micro_batches=3))
    plan = planner.plan(more)
    check(plan, more)
    assert [len(plan.of_rank(r)) for r in (0, 1)] == [3, 3]
    enough = replace(asked, limits=replace(asked.limits, min_micro_batches=1))
    assert planner.plan(enough) == planner.plan(asked)


def test_raise_micro_batches_by_hand() -> None:
    placed = [Placement((0, 1, 2, 3, 4), 0, 2), Placement((5,), 0, 1), Placement((6, 7), 1, 1)]
    assert raise_micro_batches(placed, 4, 2) == placed
    raised = raise_micro_batches(placed, 4, 5)
    assert [p.members for p in raised] == [(0,), (1, 2), (3, 4), (5,), (6,), (7,)]
    assert [p[1:] for p in raised] == [(0, 2)] * 3 + [(0, 1)] + [(1, 1)] * 2
    assert raise_micro_batches([], 4, 5) == []


@pytest.mark.parametrize("planner", PLANNED, ids=repr)
def test_recompute_policy(planner: Planner) -> None:
    asked = request(texts(*[1000] * 8), 2, memory=16 * MiB)
    auto = planner.plan(asked)
    check(auto, asked)
    assert {m.recompute for m in auto.micro_batches} != {(0,)}, (
        "the limit must bind for this test to mean anything"
    )
    full = replace(asked, limits=replace(asked.limits, recompute="full"))
    plan = planner.plan(full)
    check(plan, full)
    assert {m.recompute for m in plan.micro_batches} == {(4,)}
    none = replace(asked, limits=replace(asked.limits, recompute="none", memory_bytes=50 * MiB))
    plan = planner.plan(none)
    check(plan, none)
    assert {m.recompute for m in plan.micro_batches} == {(0,)}


def test_packing_is_refused_by_what_pads_only() -> None:
    asked = request(texts(5, 9, 4), 1, packing=True)
    with pytest.raises(ValueError, match="packing=True: this planner pads"):
        Static().plan(asked)
    with pytest.raises(ValueError, match="packing=True is not possible with lockstep=True"):
        Balanced(lockstep=True).plan(asked)
    with pytest.raises(ValueError, match="packing=True: rows of mixed lengths are not padded"):
        padded_lower_bound(asked)
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert [m.packed for m in plan.micro_batches] == [True]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "allowed"), [(40, 8, 16, {1, 2, 4, 8}), (7, 7, 4, {1}), (7, 7, 7, {1, 7})]
)
def test_only_sizes_that_the_heads_allow(heads: int, kv_heads: int, world_size: int, allowed: set[int]) -> None:
    """verl-project/verl#1226: p = 16 for 40 query and 8 KV heads; deepspeedai/DeepSpeed#6392: 7 heads."""
    cost = CostModel(analytic_profile(range(1, 17), (4,)))
    world = World.build(world_size, legal_sp_sizes(world_size, heads, kv_heads))
    lengths = texts(12000, 900, 4000, 100)
    limits = Limits(memory_bytes=100_000 * MiB)
    asked = PlanRequest(sample_ids=(0, 1, 2, 3), shapes=tuple(lengths), cost=cost, world=world, limits=limits)
    plan = Balanced().plan(asked)
    check(plan, asked)
    used = {m.sp_size for m in plan.micro_batches}
    assert used <= allowed
    assert max(used) == max(allowed), "the long sample takes the widest group there is"
    with pytest.raises(ValueError, match=r"sp_size=3 is not possible here; allowed are"):
        Static(sp_size=3).plan(asked)


def test_world_and_profile_without_a_common_size() -> None:
    cost = CostModel(analytic_profile((2,), (4,)))
    asked = request(texts(5), 1, cost=COST)
    with pytest.raises(ValueError, match="profile at least one size of the world"):
        Balanced().plan(replace(asked, cost=cost))


def test_sizes_that_were_not_profiled_are_not_used() -> None:
    cost = CostModel(analytic_profile((1, 4), (4,)))
    asked = replace(request(texts(9000, 9000, 9000, 10), 4), cost=cost, limits=Limits(memory_bytes=10_000 * MiB))
    assert {m.sp_size for m in Balanced().plan(asked).micro_batches} <= {1, 4}


# Balanced in particular


def test_moves_improve_and_are_bounded() -> None:
    lengths = np.random.default_rng(5).lognormal(6, 1.0, 60).astype(int).clip(8, 4000).tolist()
    asked = request(texts(*lengths), 8)
    spans = [Balanced(max_moves=moves).plan(asked).makespan for moves in (0, 1, 5, 200)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]
    with pytest.raises(ValueError, match="max_moves=-1"):
        Balanced(max_moves=-1)


@pytest.mark.parametrize(("world_size", "count", "limit"), [(8, 64, 0.13), (6, 64, 0.13), (64, 512, 0.09)])
def test_gap_on_lognormal_lengths(world_size: int, count: int, limit: float) -> None:
    sizes = tuple(p for p in (1, 2, 4, 8, 16, 32, 64) if p <= world_size)
    cost = CostModel(analytic_profile(sizes, (4,)))
    lengths = np.random.default_rng(1).lognormal(6.0, 1.1, count).astype(int).clip(8, 16384).tolist()
    asked = request(texts(*lengths), world_size, cost=cost, memory=500 * MiB)
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert plan.gap < limit


# Names


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("balanced", {"max_moves": 1.5}),
        ("balanced", {"max_moves": True}),
        ("balanced", {"lockstep": 1}),
        ("static", {"batch_size": 1e9}),
        ("static", {"sp_size": "2"}),
        ("floating", {"min_samples": 2.0, "max_samples": 4}),
        ("floating", {"min_samples": 1, "max_samples": 4, "candidates": "8"}),
        ("floating", {"min_samples": 1, "max_samples": 4, "planner": "static"}),
        ("bucket", {"sp_size": 0}),
        ("packed", {"rows": None}),
        ("dcp-inter", {"window": 10.0}),
        ("dcp-intra", {"edges": (10.0, 20.0)}),
        ("dcp-intra", {"length_groups": 65}),
        ("dcp-intra", {"certify": "yes"}),
        ("dcp-inter", {"full_batches": 3}),
    ],
)
def test_options_of_a_wrong_type_or_size_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"({'|'.join(options)})=.*(allowed are|must be)"):
        create(name, **options)


def test_create() -> None:
    assert create("static", sp_size=2, batch_size=3) == Static(sp_size=2, batch_size=3)
    assert create("balanced") == Balanced()
    planner = Static()
    assert create(planner) is planner
    for name in PLANNERS:
        with pytest.raises(ValueError, match=rf"planner '{name}' has no option \['colour'\]; allowed are \w"):
            create(name, colour="red")
    with pytest.raises(ValueError, match="'replay' cannot be made with"):
        create("replay")
    with pytest.raises(ValueError, match="'buckets' is unknown; allowed are balanced, bucket"):
        create("buckets")
    assert create("balanced", lockstep=True).lockstep
    with pytest.raises(ValueError, match="set them on the object"):
        create(planner, sp_size=2)
    for wrong in (3, Static, None):
        with pytest.raises(TypeError, match="allowed are the names"):
            create(wrong)  # type: ignore[arg-type]


def test_planners_satisfy_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("")
    for name, planner in (
        ("static", Static()),
        ("balanced", Balanced()),
        ("replay", Replay(tmp_path / "plans")),
    ):
        assert isinstance(planner, Planner)
        assert (planner.name, planner.draws, planner.lockstep) == (name, False, False)
