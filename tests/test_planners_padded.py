"""The padded mode of the default planner, part by part: menus, prices and their proof, pour, moves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import loads_of
from lightning_dcp.planners import Balanced, InfeasibleError, PlanRequest, Static, lower_bound
from lightning_dcp.planners.assembly import settings_within
from lightning_dcp.planners.bound import padded_lower_bound
from lightning_dcp.planners.padded import ALL, Bounds
from lightning_dcp.planners.padded.certificate import Certificate
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.lookup import Lookup
from lightning_dcp.planners.padded.menus import unasked
from lightning_dcp.planners.padded.moves import Improver
from lightning_dcp.planners.padded.pour import Item, fitting
from lightning_dcp.planners.padded.prices import Cuts, cut
from lightning_dcp.planners.padded.schedule import Schedule
from lightning_dcp.planners.padded.search import _Search
from lightning_dcp.planners.padded.sources import for_certificates
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import World
from tests.planning_tools import COST, COST_2D, MiB, check, partitions, request, requests, texts
from tests.synthetic import analytic_profile
from tests.test_cost import measurement, noisy_profiles, profile

some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lognormal(count: int, median: int, sigma: float, seed: int, longest: int = 16_384) -> list[tuple[int, ...]]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return texts(*drawn.astype(int).clip(8, longest).tolist())


def built(asked: PlanRequest, margin: int = ALL) -> Bounds:
    try:
        return Bounds.build(asked, margin)
    except InfeasibleError:
        assume(False)
        raise


def least_area(asked: PlanRequest, makespan: int, shapes: list[tuple[int, ...]]) -> int | None:
    """Least rank-time over all ways to share micro-batches of at most ``makespan``, padded to multiples only."""
    cost, limits = asked.cost, asked.limits

    @cache
    def area(members: tuple[int, ...]) -> int | None:
        chosen = [shapes[i] for i in members]
        longest = [max(axis) for axis in zip(*chosen, strict=True)]
        found = []
        for p in (p for p in asked.world.sp_sizes if p in cost.sp_sizes):
            shape = (-(-longest[0] // p) * p, *longest[1:])
            tokens = int(np.prod(shape))
            refused = (
                len(members) > (limits.max_batch_size or len(members)),
                len(members) * tokens // p > (limits.max_tokens or len(members) * tokens),
                limits.exact_shapes and set(chosen) != {shape},
            )
            t = cost.settings(
                p, np.asarray(len(members)), np.asarray(tokens), limits.memory_bytes, limits.recompute
            )
            if not any(refused) and int(t.nanoseconds) <= makespan:
                found.append(p * int(t.nanoseconds))
        return min(found, default=None)

    totals = []
    for parts in partitions(range(len(shapes))):
        areas = [area(tuple(part)) for part in parts]
        if None not in areas:
            totals.append(sum(a for a in areas if a is not None))
    return min(totals, default=None)


# Prices and their proof


@some
@given(asked=requests(max_samples=6), percent=st.sampled_from([100, 110, 300]))
def test_the_cut_is_the_cheapest_of_all_partitions(asked: PlanRequest, percent: int) -> None:
    """Mixed lengths and widths included: sorted neighbours in each micro-batch lose nothing (with one axis)."""
    bounds = built(asked)
    assume(asked.shapes.shape[1] == 1)
    unit = bounds.samples.unit
    within = min(bounds.least * percent // 100, *(menu.cap for menu in bounds.menus), 2**50)
    found = cut(bounds.samples, bounds.menus, unit, np.full(len(unit), NEVER), within)
    assert int(found.least[0]) == least_area(asked, within, list(asked.sizes))


@some
@given(asked=requests(max_samples=5), data=st.data())
def test_any_prices_prove_no_more_than_is_true(asked: PlanRequest, data: st.DataObject) -> None:
    """Two axes, exact shapes, every limit; prices from nothing to far too high."""
    bounds = built(asked, data.draw(st.sampled_from([0, 5, ALL])))
    alone, menus = bounds._padded()
    samples, world_size = bounds.samples, asked.world.world_size
    asked_within = bounds.least * data.draw(st.integers(100, 300)) // 100
    # What is longer than the menus know cannot be claimed anything about.
    within = min(asked_within, *(menu.cap for menu in menus), 2**50)
    cuts = cut(samples, menus, samples.unit, unasked(alone, menus, within)[samples.unit], within)
    price = cuts.least[:-1] - cuts.least[1:]
    tenths = data.draw(st.lists(st.integers(-3, 40), min_size=len(price), max_size=len(price)))
    for prices in (price, price * np.asarray(tenths) // 10):
        least = np.append(np.cumsum(prices[::-1])[::-1], 0)
        bound = Certificate(samples=samples, alone=alone, menus=menus).bound(least, asked_within, world_size)
        true = least_area(asked, within, list(asked.sizes))
        assert bound <= within
        assert true is None or bound <= -(-true // world_size)


def test_wide_groups_that_were_not_asked_for_lower_the_prices() -> None:
    """Pairs on one rank cost 1.05 ms a sample, any batch on two ranks 1.051 ms and more: so these are not asked for.

    But nine samples are four pairs and a single one, and three of them cost less on two ranks than as pair and single.
    """
    rows = tuple(
        replace(
            m, forward=(0,), backward=(0,), recompute=(0,), constant_time=fixed + m.batch_size * m.shape[0] * each
        )
        for m in COST.profile.measurements
        for fixed, each in [(100_000, 1_000) if m.sp_size == 1 else (50_000, 513)]
        if m.sp_size <= 2
    )
    cost = CostModel(replace(COST.profile, measurements=rows))
    asked = request(texts(*[1000] * 9), 2, cost=cost, max_tokens=2000)
    pair, single, three = (cost.nanoseconds(b, (1000,), p, (0,)) * p for b, p in ((2, 1), (1, 1), (3, 2)))
    cheapest = 3 * pair + three
    assert cheapest < 4 * pair + single
    bounds = Bounds.build(asked, 0)
    assert bounds.menus[1].asked == 0, "only what was not asked for is tested here"
    unit, world_size = bounds.samples.unit, 2
    certificate = Certificate(samples=bounds.samples, alone=bounds.alone, menus=bounds.menus)
    blind = cut(bounds.samples, bounds.menus, unit, np.full(9, NEVER), bounds.menus[0].cap)
    assert int(blind.least[0]) > cheapest
    assert certificate.bound(blind.least, 2**50, world_size) * 2 <= cheapest
    assert bounds.certify()[1] * 2 <= cheapest
    assert padded_lower_bound(asked) == -(-cheapest // 2)


@some
@given(measured=noisy_profiles(), data=st.data())
def test_no_batch_size_is_below_its_floor(measured: Profile, data: st.DataObject) -> None:
    """Between two rows too, with any recompute and rounding."""
    cost = CostModel(measured)
    lengths = texts(*data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=60)))
    need = max(cost.bytes(1, s, 1, cost.num_layers) for s in lengths)
    asked = request(lengths, 1, cost=cost, memory=need + data.draw(st.sampled_from([0, 100, 10**6])))
    try:
        bounds = Bounds.build(asked, ALL)
    except ValueError:
        return
    (menu,) = bounds.menus
    sizes = np.arange(1, menu.last + 1)
    tokens = bounds.alone.tokens[1]
    exact = cost.settings(1, sizes[:, None], tokens, asked.limits.memory_bytes).nanoseconds
    floors = menu.floors(sizes, slice(None))
    assert ((floors <= exact) | (exact >= NEVER)).all() or (menu.times[-1] > menu.cap).any()


def test_floors_by_hand() -> None:
    """Two quantities grow by half a nanosecond more than a millisecond a sample: each loses half of one at 17."""
    rows = [
        measurement(b, forward=(time,), backward=(0,), recompute=(0,), constant_time=time)
        for b in (2, 100)
        for time in (1_000_000 * b + b // 2,)
    ]
    cost = CostModel(profile(*rows, num_layers=(1,)))
    asked = request(texts(*[100] * 40), 1, cost=cost)
    (menu,) = Bounds.build(asked, ALL).menus
    assert menu.batch_sizes[15:17].tolist() == [16, 18]
    exact = [cost.nanoseconds(b, (100,), 1, (0,)) for b in (16, 17, 18)]
    assert exact == [32_000_016, 34_000_016, 36_000_018]
    assert 34_000_000 < int(menu.floors(np.asarray([17]), slice(None))[0, 0]) <= 34_000_016


def test_certificates_with_two_axes_count_the_fewest_padded_tokens_of_longer_samples() -> None:
    """24 tokens stay 24 on two ranks, 21 would become 28; equal tokens count for each other."""
    shapes = [(4, 6), (3, 7), (5, 6), (6, 5), (2, 3)]
    bounds = Bounds.build(request(shapes, 2, cost=COST_2D), ALL)
    assert bounds.samples.distinct.tolist() == [[5, 6], [6, 5], [4, 6], [3, 7], [2, 3]]
    assert bounds.alone.tokens[2].tolist() == [36, 30, 24, 28, 6]
    alone = for_certificates(bounds.samples, bounds.alone)
    assert alone.tokens[2].tolist() == [30, 30, 24, 24, 6]
    assert alone.tokens[1].tolist() == [30, 30, 24, 21, 6]


def exact_least(bounds: Bounds, makespan: int) -> int:
    """The dynamic program one sample after the other, with every batch size."""
    asked, shapes = bounds.request, bounds.samples.shapes
    count = len(shapes)
    least = [0] * (count + 1)
    for i in reversed(range(count)):
        sizes = np.arange(1, count - i + 1)
        options = []
        for menu in bounds.menus:
            largest = np.broadcast_to(shapes[i], (len(sizes), 1))
            times = settings_within(asked, menu.sp_size, sizes, largest).nanoseconds
            options += [
                menu.sp_size * t + least[i + b]
                for t, b in zip(times.tolist(), sizes.tolist(), strict=True)
                if t <= makespan
            ]
        least[i] = min(options)
    return least[0]


@pytest.mark.parametrize(("median", "memory"), [(60, 400), (400, 400), (400, 150)])
def test_the_bound_is_near_the_exact_program_for_many_samples(median: int, memory: int) -> None:
    """Parts worked on side by side, batch sizes that are not tabled, recompute: 0.2 % in all."""
    asked = request(lognormal(200, median, 1.0, 3), 8, memory=memory * MiB)
    bounds = Bounds.build(asked, ALL)
    _, bound = bounds.certify(3)
    exact = -(-exact_least(bounds, bound) // 8)
    assert bounds.least < bound
    assert 0.998 * exact < bound <= exact
    assert bounds.least <= Bounds.build(asked, 5).certify()[1] <= bound


@pytest.mark.parametrize("count", [100, 3000])
def test_the_bound_of_a_plan_is_at_most_the_tight_one(count: int) -> None:
    asked = request(lognormal(count, 100, 1.0, 1), 8, memory=500 * MiB)
    plan = Balanced().plan(asked)
    assert lower_bound(asked) < plan.lower_bound <= padded_lower_bound(asked) <= plan.makespan


def test_the_bound_prices_padding() -> None:
    """One micro-batch of lengths 100 and 1000 is dearer than two halves of what their own lengths would cost."""
    asked = request(texts(1000, 100), 1)
    apart = sum(COST.nanoseconds(1, (length,), 1, (0,)) for length in (1000, 100))
    assert Balanced().plan(asked).makespan == apart == padded_lower_bound(asked) > lower_bound(asked)


# Times that the search asks for


@some
@given(asked=requests(max_samples=60), data=st.data())
def test_times_of_the_search(asked: PlanRequest, data: st.DataObject) -> None:
    """What fits is exact; so are times without recompute, up to rounding, and of all tabled batch sizes."""
    bounds = built(asked)
    found = _Search(bounds, bounds.certify()[0], bounds.least)._lookup
    shapes, ends = bounds.samples.shapes, bounds.samples.ends
    for menu in bounds.menus:
        start = data.draw(st.integers(0, len(shapes) - 1))
        times, sizes = found.column(menu.sp_size, start)
        assert times == sorted(times)
        for b in range(1, int(ends[start]) - start + 1):
            largest = shapes[start : start + b].max(axis=0)
            exact = settings_within(asked, menu.sp_size, np.asarray(b), largest)
            time = found.nanoseconds(menu.sp_size, start, b)
            if time < NEVER:
                assert int(exact.nanoseconds) < NEVER
                assert b not in sizes or time == int(exact.nanoseconds)
                after = min(size for size in sizes if size >= b)
                most = shapes[start : start + after].max(axis=0)
                recomputed = settings_within(asked, menu.sp_size, np.asarray(after), most).recompute.any()
                assert recomputed or not bounds.samples.nested or abs(time - int(exact.nanoseconds)) <= 20
            elif int(exact.nanoseconds) < NEVER and sizes and start < menu.asked:
                assert times[-1] > menu.cap, "only what is too long was not asked for"


@some
@given(st.data())
def test_fitting_by_brute_force(data: st.DataObject) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(17, 60), max_size=8)) | set(range(1, 17)))
    times = np.cumsum(data.draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))).tolist()
    most, room = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 800))
    line = {
        b: t + (u - t) * (b - a) // (c - a)
        for (a, t), (c, u) in pairwise(zip(sizes, times, strict=True))
        for b in range(a, c)
    }
    line[sizes[-1]] = times[-1]
    best = max((b for b, t in line.items() if b <= most and t <= room), default=0)
    assert fitting((times, sizes), most, room) == (best, line.get(best, 0))


# Schedule and moves


def test_schedule_by_hand() -> None:
    wide, pair, single = Item(0, 1, 0, 4, 7), Item(1, 2, 2, 2, 5), Item(3, 1, 3, 1, 2)
    schedule = Schedule(4, [wide, pair, single])
    assert schedule.loads.tolist() == [7, 7, 12, 14]
    assert [schedule.load_of(block) for block in ((0, 2), (2, 2), (0, 4), (2, 1))] == [7, 14, 14, 12]
    assert schedule.on[3] == [wide, pair, single]
    assert (schedule.at[1], schedule.until[1]) == (pair, wide)
    schedule.remove(pair)
    assert schedule.loads.tolist() == [7, 7, 7, 9]
    assert schedule.items == [wide, single]
    assert sorted(schedule.until) == [1, 4]
    schedule.remove(wide)
    assert schedule.makespan == 2


def loads_by_hand(items: list[Item], world_size: int) -> NDArray[np.int64]:
    loads = np.zeros(world_size, dtype=np.int64)
    for item in items:
        for rank in range(item.first_rank, item.first_rank + item.sp_size):
            loads[rank] += item.nanoseconds
    return loads


@some
@given(asked=requests(max_samples=40), moves=st.integers(0, 30), seed=st.integers(0, 2**32 - 1))
def test_moves_keep_the_books_and_make_nothing_worse(asked: PlanRequest, moves: int, seed: int) -> None:
    """From a bad start, so that all kinds of moves are made: everything on random groups, one by one."""
    bounds = built(asked)
    search = _Search(bounds, bounds.certify()[0], bounds.least)
    rng, lookup, items = np.random.default_rng(seed), search._lookup, []
    for i in range(len(asked.shapes)):
        fitting_sizes = [p for p in lookup.sp_sizes if lookup.nanoseconds(p, i, 1) < NEVER]
        p = int(rng.choice(fitting_sizes))
        first, _ = asked.world.blocks_of(p)[rng.integers(len(asked.world.blocks_of(p)))]
        items.append(Item(i, 1, first, p, lookup.nanoseconds(p, i, 1)))
    schedule = Schedule(asked.world.world_size, items)
    before = schedule.makespan
    Improver(schedule, asked.world, lookup).improve(moves, 0)
    assert schedule.makespan <= before
    assert schedule.loads.tolist() == loads_by_hand(schedule.items, asked.world.world_size).tolist()
    starts = [item.start for item in schedule.items]
    assert starts == np.cumsum([0, *(item.batch_size for item in schedule.items)])[:-1].tolist()
    assert sorted(item for mine in schedule.on for item in mine) == sorted(
        item for item in schedule.items for _ in range(item.sp_size)
    )
    columns = np.asarray(schedule.items)
    loads = loads_of(asked.world.world_size, columns[:, 2], columns[:, 3], columns[:, 4])
    assert loads.tolist() == schedule.loads.tolist()
    ends = bounds.samples.ends
    assert all(item.start + item.batch_size <= ends[item.start] for item in schedule.items)


def proportional_cost(sp_sizes: tuple[int, ...] = (1,)) -> CostModel:
    """A microsecond a token, shared by the ranks; nothing gained by batches."""
    rows = tuple(
        replace(
            m,
            forward=(0,),
            backward=(0,),
            recompute=(0,),
            constant_time=1000 * m.batch_size * m.shape[0] // m.sp_size,
        )
        for m in COST.profile.measurements
        if m.sp_size in sp_sizes
    )
    return CostModel(replace(COST.profile, measurements=rows))


def improved(asked: PlanRequest, items: list[Item]) -> Schedule:
    bounds = Bounds.build(asked, ALL)
    lookup = Lookup(bounds.source, bounds.menus, bounds.samples.unit, bounds.samples.ends)
    timed = [
        item._replace(nanoseconds=lookup.nanoseconds(item.sp_size, item.start, item.batch_size)) for item in items
    ]
    schedule = Schedule(asked.world.world_size, timed)
    Improver(schedule, asked.world, lookup).improve(1, 0)
    return schedule


@pytest.mark.parametrize(
    ("sizes", "lengths", "limits", "items", "best"),
    [
        # 3 + 3 and 2 + 2 + 2 from 3 + 2 + 2 and 3 + 2: only an exchange helps.
        (
            (1,),
            (3000, 3000, 2000, 2000, 2000),
            {"max_batch_size": 1},
            [(0, 1, 0, 1), (1, 1, 1, 1), (2, 1, 0, 1), (3, 1, 0, 1), (4, 1, 1, 1)],
            6_000_000,
        ),
        # The last of four samples goes over: 3 and 2 + 1 from 4 and 2.
        ((1,), (1000,) * 6, {}, [(0, 4, 0, 1), (4, 2, 1, 1)], 3_000_000),
        ((1,), (4000, 1000), {}, [(0, 1, 0, 1), (1, 1, 0, 1)], 4_000_000),
        ((1, 2), (4000,), {}, [(0, 1, 0, 1)], 2_000_000),
        # The odd one must stay on its rank; the other leaves the pair for the rank beside it.
        ((1, 2), (3001, 2000), {"exact_shapes": True}, [(0, 1, 0, 1), (1, 1, 0, 2)], 3_001_000),
    ],
    ids=["exchange", "part", "whole", "wider", "narrower"],
)
def test_each_kind_of_move(
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    limits: Any,
    items: list[tuple[int, int, int, int]],
    best: int,
) -> None:
    asked = request(texts(*lengths), 2, cost=proportional_cost(sizes), **limits)
    schedule = improved(asked, [Item(*item, 0) for item in items])
    assert schedule.makespan == best


def test_two_micro_batches_become_one() -> None:
    """Both on rank 0, with a fixed cost each: joined they cost it once."""
    asked = request(texts(*[50] * 4), 1)
    schedule = improved(asked, [Item(0, 2, 0, 1, 0), Item(2, 2, 0, 1, 0)])
    assert [item.batch_size for item in schedule.items] == [4]
    assert schedule.makespan == COST.nanoseconds(4, (50,), 1, (0,))


# The whole search


@some
@given(asked=requests(max_samples=40))
def test_the_search_believes_nearly_what_the_plan_costs(asked: PlanRequest) -> None:
    """Recompute between two tabled batch sizes is interpolated; a layer of one micro-batch is at stake."""
    asked = replace(asked, limits=replace(asked.limits, min_micro_batches=1))
    bounds = built(asked)
    cuts, bound = bounds.certify()
    search = _Search(bounds, cuts, bound)
    span, items = search._poured()
    assert loads_by_hand(items, asked.world.world_size).max() == span
    assert search.best(0).makespan <= span * 1.02 + 100
    assert bound <= search.best(200).makespan <= search.best(0).makespan


def test_samples_without_room_on_their_own_width_go_to_wider_groups() -> None:
    """The longest sample needs all eight ranks; behind it one rank alone has no room for the second, two have."""
    cost = proportional_cost((1, 2, 4, 8))
    asked = request(texts(48_000, 6_000, *[1_000] * 34), 8, cost=cost, max_batch_size=1)
    plan = Balanced().plan(asked)
    check(plan, asked)
    widths = {m.shapes[0][0]: m.sp_size for m in plan.micro_batches}
    assert widths[48_000] == 8
    assert widths[6_000] >= 2
    assert plan.gap < 0.01


@pytest.mark.parametrize("world_size", [1, 3, 6, 12])
def test_any_world(world_size: int) -> None:
    sizes = tuple(p for p in (1, 2, 3, 4, 6, 12) if p <= world_size)
    cost = CostModel(analytic_profile(sizes, (4,)))
    asked = replace(
        request(lognormal(20 * world_size, 500, 1.2, world_size), world_size, cost=cost),
        world=World.build(world_size, sizes, min(world_size, 4)),
    )
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert plan.makespan <= 1.01 * padded_lower_bound(asked)


def test_groups_wider_than_a_node_are_priced_from_their_own_rows() -> None:
    """Eight ranks in two nodes: where p = 8 costs three times as much it is not used, else it is."""
    rows = analytic_profile((1, 2, 4, 8), (4,)).measurements
    slow = tuple(
        replace(m, forward=tuple(3 * t for t in m.forward), backward=tuple(3 * t for t in m.backward))
        if m.sp_size == 8
        else m
        for m in rows
    )
    for measurements, widest in ((rows, 8), (slow, 4)):
        cost = CostModel(replace(COST.profile, measurements=measurements))
        asked = replace(
            request(texts(12_000), 8, cost=cost, memory=10_000 * MiB), world=World.build(8, (1, 2, 4, 8), 4)
        )
        assert [m.sp_size for m in Balanced().plan(asked).micro_batches] == [widest]


@pytest.mark.parametrize(
    ("count", "memory", "seeds", "gap", "idle"),
    [(512, 4000, 2, 0.006, 0.005), (512, 200, 2, 0.006, 0.005), (2048, 200, 1, 0.002, 0.002)],
)
def test_near_the_bound_where_memory_decides_the_recompute(
    count: int, memory: int, seeds: int, gap: float, idle: float
) -> None:
    world_size, sizes = 32, (1, 2, 4, 8, 16, 32)
    cost = CostModel(analytic_profile(sizes, (32,)))
    found = []
    for seed in range(seeds):
        asked = replace(
            request(lognormal(count, 400, 1.1, seed), world_size, cost=cost, memory=memory * MiB),
            world=World.build(world_size, sizes, 8),
        )
        plan = Balanced().plan(asked)
        check(plan, asked)
        found.append((plan.makespan / padded_lower_bound(asked) - 1, plan.idle_ratio))
        counts = {m.recompute for m in plan.micro_batches}
        assert (len(counts) > 5) is (memory == 200), "the memory must decide for this to mean much"
    assert np.mean([g for g, _ in found]) < gap
    assert np.mean([i for _, i in found]) < idle


def test_a_smaller_micro_batch_is_taken_where_recompute_makes_it_faster() -> None:
    """Memory for two samples without recompute and for four with all: two at a time are faster for each sample."""
    rows = tuple(replace(m, constant_time=1000) for m in COST.profile.measurements if m.sp_size == 1)
    cost = CostModel(replace(COST.profile, measurements=rows))
    memory = cost.bytes(2, (1024,), 1, (0,))
    asked = request(texts(*[1024] * 8), 1, cost=cost, memory=memory)
    four = cost.settings(1, np.asarray(4), np.asarray(1024), memory)
    assert int(four.recompute[0]) > 0
    assert int(four.nanoseconds) > 2 * cost.nanoseconds(2, (1024,), 1, (0,))
    plan = Balanced().plan(asked)
    assert {(m.batch_size, m.recompute) for m in plan.micro_batches} <= {(2, (0,)), (1, (0,))}


@pytest.mark.parametrize("seed", range(3))
def test_two_axes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [
        (int(f), int(p)) for f, p in zip(rng.integers(1, 60, 120), rng.choice([16, 25, 64], 120), strict=True)
    ]
    asked = request(shapes, 4, cost=COST_2D, memory=500 * MiB)
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert plan.makespan < Static().plan(asked).makespan
    assert lower_bound(asked) < padded_lower_bound(asked) <= plan.makespan < 1.03 * padded_lower_bound(asked)


def test_cuts_by_hand() -> None:
    cuts = Cuts(
        least=np.zeros(6, dtype=np.int64),
        sp_size=np.asarray([2, 1, 1, 1, 1]),
        row=np.zeros(5, dtype=np.int64),
        batch_size=np.asarray([2, 1, 1, 2, 1]),
    )
    assert cuts.chain() == [0, 2, 3]


def lines(*rows: tuple[int, int, int, int], largest: int = 8192) -> CostModel:
    """A model whose time is ``first + each * b`` at each size: rows of ``(p, first, each, bytes of a sample)``."""
    made = [
        Measurement(
            batch_size=b,
            shape=(s,),
            sp_size=p,
            forward=(0,),
            backward=(0,),
            recompute=(0,),
            activation_bytes=(0,),
            input_bytes=(0,),
            constant_time=first + each * b,
            constant_bytes=held * b,
        )
        for p, first, each, held in rows
        for b in (1, largest)
        for s in (10, 20)
    ]
    return CostModel(Profile(identity={}, num_layers=(1,), static_bytes=0, measurements=tuple(made)))


@pytest.mark.parametrize(("scale", "count"), [(1, 1100), (1_000_000, 300), (1, 100)])
def test_a_wide_batch_that_is_cheaper_by_a_hair_is_not_overlooked_by_the_bound(scale: int, count: int) -> None:
    """Two ranks share a batch at one part in 8192 below the rank-time of single ranks."""
    cost = lines((1, 0, 8194 * scale, 0), (2, scale, 4096 * scale, 0))
    asked = request(texts(*[10] * count), 2, cost=cost)
    plan = Static(sp_size=2, batch_size=count).plan(asked)
    assert lower_bound(asked) <= plan.makespan
    assert padded_lower_bound(asked) <= plan.makespan
    assert Balanced().plan(asked).gap >= 0


@pytest.mark.parametrize("nanoseconds", [1, 3, 40])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_steps_of_a_few_nanoseconds_are_planned(nanoseconds: int, count: int) -> None:
    asked = request(texts(*[10] * count), 2, cost=lines((1, 0, nanoseconds, 0), (2, nanoseconds, nanoseconds, 0)))
    plan = Balanced().plan(asked)
    check(plan, asked)
    assert plan.makespan == -(-count // 2) * nanoseconds


def test_rank_times_beyond_what_is_counted_are_refused_and_do_not_hang() -> None:
    """One rank has too little memory, and eight ranks together would take 2**50 ns and more."""
    cost = lines((1, 0, 2**49, 100), (8, 0, 2**47 + 1, 10), largest=2)
    asked = request(texts(*[10] * 9), 8, cost=cost, memory=50)
    with pytest.raises(ValueError, match=r"2\*\*50 ns .* the profile is damaged"):
        Balanced().plan(asked)
    short = request(texts(*[10] * 9), 8, cost=lines((1, 0, 2**46, 100), (8, 0, 2**43, 10), largest=9), memory=50)
    check(Balanced().plan(short), short)
