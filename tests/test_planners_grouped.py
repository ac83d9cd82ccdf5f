"""The planners that draw: rules of every step, whole epochs, and what the paper says of dcp-inter and dcp-intra."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import InfeasibleError, PlanRequest
from lightning_dcp.planners.grouped import Bucket, DCPInter, DCPIntra, PackedBaseline
from lightning_dcp.planners.grouped.base import Drawing, Grouped
from lightning_dcp.planners.protocol import DrawingPlanner
from lightning_dcp.topology import World
from tests.planning_tools import COST, MiB, check, request, requests, texts

ROOT = Path(__file__).parents[1]
DATA_CENTRIC = (DCPInter(), DCPIntra())
PLANNERS: tuple[Drawing, ...] = (*DATA_CENTRIC, Bucket(), PackedBaseline())
NAMES = ["dcp-inter", "dcp-intra", "bucket", "packed"]


def planned(planner: Drawing, asked: PlanRequest) -> IterationPlan:
    assert isinstance(planner, DrawingPlanner)
    return planner.plan(asked)


def allowing(planner: Drawing, asked: PlanRequest) -> PlanRequest:
    """The request with permission to pack for the one planner that packs."""
    packing = isinstance(planner, PackedBaseline)
    return replace(asked, limits=replace(asked.limits, packing=packing))


def lengths(count: int, seed: int = 0, longest: int = 3000) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(5.0, 1.2, count).astype(int) + 1
    return [min(length, longest) for length in drawn.tolist()]


def epoch(planner: Drawing, asked: PlanRequest, window: int) -> Iterator[tuple[IterationPlan, PlanRequest]]:
    """Plans and requests of all steps of an epoch whose samples are those of the request."""
    left = np.arange(len(asked.sample_ids))
    while len(left):
        offered = replace(asked, sample_ids=asked.sample_ids[left[:window]], shapes=asked.shapes[left[:window]])
        plan = planned(planner, offered)
        yield plan, offered
        held = {i for m in plan.micro_batches for i in m.sample_ids}
        left = left[[i not in held for i in asked.sample_ids[left].tolist()]]


@given(asked=requests(max_samples=40), last=st.booleans(), planner=st.sampled_from(PLANNERS))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_step_keeps_the_rules(asked: PlanRequest, last: bool, planner: Drawing) -> None:
    if isinstance(planner, PackedBaseline):
        if asked.shapes.shape[1] > 1:
            return
        asked = replace(asked, limits=replace(asked.limits, exact_shapes=False))
    asked = allowing(planner, asked)
    planner = replace(planner, window=1000 if last else len(asked.sample_ids))
    plan = planned(planner, asked)
    check(plan, asked, drawn=True)
    assert plan.lower_bound > 0
    assert planned(planner, asked).digest() == plan.digest()


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
@pytest.mark.parametrize(("world_size", "window"), [(1, 30), (3, 1), (4, 30), (8, 500)])
def test_an_epoch_has_each_sample_once(planner: Drawing, world_size: int, window: int) -> None:
    count = 60 if window == 1 else 200
    asked = allowing(planner, request(texts(*lengths(count)), world_size, memory=40 * MiB))
    steps = list(epoch(replace(planner, window=window), asked, window))
    for plan, offered in steps:
        check(plan, offered, drawn=True)
        assert plan.num_samples > 0
    held = [i for plan, _ in steps for m in plan.micro_batches for i in m.sample_ids]
    assert sorted(held) == asked.sample_ids.tolist()
    assert any(len(offered.sample_ids) < window for _, offered in steps) or window == 1


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
def test_a_single_sample_and_none(planner: Drawing) -> None:
    for world_size in (1, 6):
        asked = allowing(planner, request(texts(77), world_size))
        plan = planned(planner, asked)
        check(plan, asked, drawn=True)
        assert plan.num_samples == 1
    assert planned(planner, allowing(planner, request([], 4))).micro_batches == ()


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
def test_more_ranks_than_samples(planner: Drawing) -> None:
    asked = allowing(planner, request(texts(3000, 2000, 2500), 8))
    plan = planned(planner, asked)
    check(plan, asked, drawn=True)
    # The ranks are shared out rather than left idle, though single ranks have the most throughput.
    if planner in DATA_CENTRIC:
        assert sum(p for _, p in {(m.first_rank, m.sp_size) for m in plan.micro_batches}) > 5


@pytest.mark.parametrize("planner", DATA_CENTRIC, ids=NAMES[:2])
def test_batches_are_made_shorter_where_much_is_idle(planner: DCPInter | DCPIntra) -> None:
    # One batch of each group would hold all of its samples and be up to 25 times as long as the others.
    asked = request(texts(*[30] * 16, *[300] * 16, *[2000] * 16), 4, memory=400 * MiB)
    plan, full = (planned(replace(planner, window=48, full_batches=full), asked) for full in (False, True))
    check(plan, asked, drawn=True)
    check(full, asked, drawn=True)
    assert plan.idle_ratio < 0.3 < full.idle_ratio
    shorter, paper = (
        sum(plan.makespan for plan, _ in epoch(replace(planner, window=48, full_batches=full), asked, 48))
        for full in (False, True)
    )
    assert shorter < 0.9 * paper


@pytest.mark.parametrize("planner", DATA_CENTRIC, ids=NAMES[:2])
@pytest.mark.parametrize("world_size", [*range(1, 9), 12, 24])
def test_the_groups_of_a_step_add_up_to_the_world(planner: Drawing, world_size: int) -> None:
    world = World.build(world_size, [p for p in COST.sp_sizes if p <= world_size], min(8, world_size))
    # The longest need the widest groups.
    memory = COST.bytes(1, (3000,), world.sp_sizes[-1], (4,))
    asked = replace(request(texts(*lengths(1500, seed=world_size)), world_size, memory=memory), world=world)
    widths = set()
    for plan, _ in islice(epoch(replace(planner, certify=False), asked, 1000), 6):
        groups = {(m.first_rank, m.sp_size) for m in plan.micro_batches}
        assert sum(p for _, p in groups) == world_size
        widths |= {p for _, p in groups}
    assert len(widths) > 1 or world_size < 3


def test_a_batch_holds_one_length_group_in_the_order_of_the_permutation() -> None:
    edges = [20, 60, 150, 400, 10_000]
    asked = request(texts(*lengths(600)), 4)
    for planner in (DCPInter(edges=edges), DCPIntra(edges=edges), Bucket(edges=edges)):
        plan = planned(planner, asked)
        taken: dict[int, list[int]] = {}
        for m in plan.micro_batches:
            (group,) = {int(np.searchsorted(edges, s)) for (s,) in m.shapes}
            assert list(m.sample_ids) == sorted(m.sample_ids)
            taken.setdefault(group, []).extend(m.sample_ids)
        for group, ids in taken.items():
            of_group = [
                i for i, (s,) in zip(asked.ids, asked.sizes, strict=True) if np.searchsorted(edges, s) == group
            ]
            assert sorted(ids) == of_group[: len(ids)]


def test_a_sample_opens_a_batch_only_where_its_group_has_no_place_left() -> None:
    # Three groups; batches of up to 4 of the short ones. Walked along: 0 opens 10, 1 opens 100, 2 and 3 have places.
    edges = [10, 100, 1000]
    front = [10, 100, 10, 100, 1000, 10, 10, 10, 1000, 10]
    asked = request(texts(*front, *[10, 100, 1000] * 400), 4, max_batch_size=4)
    plan = planned(DCPIntra(edges=edges, window=100), replace(asked, world=World.build(4, [1])))
    by_rank = [sorted({s for m in plan.of_rank(r) for (s,) in m.shapes}) for r in range(4)]
    assert by_rank == [[10], [100], [1000], [10]]


@pytest.mark.parametrize("planner", DATA_CENTRIC, ids=NAMES[:2])
def test_a_sample_without_a_free_block_waits_and_the_next_is_tried(planner: DCPInter | DCPIntra) -> None:
    # The long samples fit four ranks only; with one rank gone they wait, and short ones fill the step.
    need = COST.bytes(1, (3000,), 4, (4,))
    assert min(COST.bytes(1, (3000,), p, (r,)) for p in (1, 2) for r in range(5)) > need
    asked = request(texts(10, 3000, 20, 3000, 15, 30, 10, 5, 10), 4, memory=need)
    asked = replace(asked, world=World.build(4, [1, 2, 4]))
    (first, _), (second, _), *_ = epoch(replace(planner, edges=[50, 3000]), asked, 9)
    assert all(s < 50 for m in first.micro_batches for (s,) in m.shapes)
    assert (second.micro_batches[0].shapes, second.micro_batches[0].sp_size) == (((3000,),), 4)


def test_the_best_other_size_is_taken_where_the_wanted_one_is_not_free() -> None:
    # On two ranks fewer layers must be recomputed, which gains more than the exchange costs (Eq. 1).
    asked = replace(request(texts(3000, 3000, 3000), 3, memory=24 * MiB), world=World.build(3, [1, 2]))
    share = {
        p: int(asked.cost.settings(p, np.asarray(1), np.asarray(3000), 24 * MiB).nanoseconds) * p for p in (1, 2)
    }
    assert share[2] < share[1]
    plan = planned(DCPIntra(), asked)
    assert {m.sp_size: m.first_rank for m in plan.micro_batches} == {2: 0, 1: 2}


@pytest.mark.parametrize("planner", DATA_CENTRIC, ids=NAMES[:2])
def test_g_min_and_g_max(planner: DCPInter | DCPIntra) -> None:
    # Four lengths: a length group's predicted time is that of each of its batches.
    drawn = np.random.default_rng(0).choice([30, 150, 700, 3000], 4000, p=[0.4, 0.3, 0.2, 0.1])
    asked = request(texts(*drawn.tolist()), 4, memory=40 * MiB)

    def counts(g_min: int, g_max: float | None) -> list[int]:
        limits = replace(asked.limits, min_micro_batches=g_min, max_step_factor=g_max)
        plan = planned(replace(planner, full_batches=True), replace(asked, limits=limits))
        if g_min == 1:
            assert plan.makespan <= (g_max or 4.0) * max(m.nanoseconds for m in plan.micro_batches)
        return [len(plan.of_rank(rank)) for rank in range(4)]

    base = counts(1, 1.0)
    assert max(base) > 1
    assert counts(max(base), 1.0) == base
    assert counts(max(base) + 1, 1.0) == [2 * g for g in base]
    assert counts(4 * max(base) - 1, 1.0) == [4 * g for g in base]
    assert counts(1, 4.0) == counts(1, None)
    assert max(counts(1, 4.0)) > max(base)


def test_all_layers_are_recomputed_by_inter_and_the_fewest_by_intra() -> None:
    asked = request(texts(*lengths(800)), 4, memory=12 * MiB)
    inter, intra = (planned(planner, asked) for planner in DATA_CENTRIC)
    assert {m.recompute for m in inter.micro_batches} == {(4,)}
    assert {m.recompute for m in intra.micro_batches} > {(0,)}
    for m in intra.micro_batches:
        (r,) = m.recompute
        assert not r or asked.cost.bytes(m.batch_size, m.padded_shape, m.sp_size, (r - 1,)) > 12 * MiB
    for policy, wanted in (("none", {(0,)}), ("full", {(4,)})):
        for planner in PLANNERS:
            limited = allowing(planner, request(texts(*lengths(800)), 4, memory=40 * MiB, recompute=policy))
            assert {m.recompute for m in planned(planner, limited).micro_batches} == wanted


def test_tokens_per_second_rise_from_inter_to_intra_over_an_epoch() -> None:
    asked = request(texts(*lengths(1000)), 8, memory=40 * MiB)
    totals = [
        sum(plan.makespan for plan, _ in epoch(replace(planner, certify=False), asked, 1000))
        for planner in DATA_CENTRIC
    ]
    assert totals[1] < totals[0]


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
def test_samples_that_need_more_than_all_layers_recomputed_are_not_refused(planner: Drawing) -> None:
    # All but one layer recomputed hold one layer's input less than all.
    least = min(COST.bytes(1, (900,), 1, (r,)) for r in range(5))
    assert least < COST.bytes(1, (900,), 1, (4,))
    asked = allowing(planner, request(texts(900, 5), 1, memory=least))
    plan = planned(planner, asked)
    check(plan, asked, drawn=True)


@pytest.mark.parametrize("edges", [None, (1000,)])
@pytest.mark.parametrize(
    "planner", [DCPInter(), Bucket(), PackedBaseline()], ids=["dcp-inter", "bucket", "packed"]
)
def test_fewer_layers_are_recomputed_for_those_samples_alone_that_would_not_fit(
    planner: Drawing, edges: tuple[int, ...] | None
) -> None:
    """Long samples in the window change nothing for the others, also where they share their length group."""
    least = min(COST.bytes(1, (900,), 1, (r,)) for r in range(5))
    assert least < COST.bytes(1, (900,), 1, (4,))
    if isinstance(planner, Grouped):
        planner = replace(planner, edges=edges)
    asked = allowing(planner, request(texts(*[5] * 30, 900, 900, *[7] * 30), 4, memory=least))
    asked = replace(asked, world=World.build(4, [1]))
    found: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    for plan, offered in epoch(planner, asked, 62):
        check(plan, offered, drawn=True)
        for m in plan.micro_batches:
            found[(900,) in m.shapes].add(m.recompute)
            assert set(m.shapes) == {(900,)} or (900,) not in m.shapes
    assert found[False] == {(4,)}
    assert found[True] == {(3,)}


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
def test_a_sample_that_fits_nothing_is_named(planner: Drawing) -> None:
    asked = allowing(planner, request(texts(10, 20, 10**6), 4, memory=20 * MiB))
    with pytest.raises(InfeasibleError, match="sample 12 of .*1000000"):
        planned(planner, asked)


@pytest.mark.parametrize("planner", PLANNERS, ids=NAMES)
def test_windows_are_large_enough_for_full_batches(planner: Drawing) -> None:
    assert isinstance(planner, DrawingPlanner)
    assert planner.draws
    assert not planner.lockstep
    assert planner.lookahead(World.build(1, [1])) == 4096
    assert planner.lookahead(World.build(32, [1])) == 512 * 32
    assert replace(planner, window=7).lookahead(World.build(32, [1])) == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"edges": []}, "edges"),
        ({"edges": [5, 5]}, "ascending"),
        ({"edges": [0, 5]}, "from 1"),
        ({"length_groups": 0}, "1 to 64"),
        ({"length_groups": 65}, "1 to 64"),
        ({"window": 0}, "window=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    for planner in (DCPInter, DCPIntra, Bucket):
        with pytest.raises(ValueError, match=words):
            planner(**options)


def test_no_bound_unless_it_is_asked_for() -> None:
    for planner in PLANNERS:
        asked = allowing(planner, request(texts(*lengths(100)), 4))
        with_bound, without = planned(planner, asked), planned(replace(planner, certify=False), asked)
        assert without.lower_bound == 0 < with_bound.lower_bound
        assert without == replace(with_bound, lower_bound=0)


def test_plans_are_equal_in_other_processes() -> None:
    code = "from tests.test_planners_grouped import digests_of_some_plans; print(digests_of_some_plans())"
    found = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    assert found == {str(digests_of_some_plans())}


def digests_of_some_plans() -> list[int]:
    asked = request(texts(*lengths(400)), 8, memory=40 * MiB)
    return [planned(planner, allowing(planner, asked)).digest() for planner in PLANNERS]
