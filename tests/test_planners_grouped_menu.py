"""Groups of similar lengths and their throughput-optimal settings, against enumeration of every integer b and p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lightning_dcp.planners import InfeasibleError, PlanRequest
from lightning_dcp.planners.assembly import pad, padded_tokens
from lightning_dcp.planners.grouped.groups import Groups, with_policy
from lightning_dcp.planners.grouped.menu import Curve, Menus, Setting, ranked
from lightning_dcp.planners.grouped.tuning import largest_batches
from tests.planning_tools import COST_2D, MiB, request, texts

LENGTHS = [1, 2, 3, 3, 40, 41, 45, 300, 310, 333, 900, 2000, 2100, 3000, 3000, 9000]

EDGES = sorted(set(LENGTHS))


def groups_of(asked: PlanRequest, edges: list[int] | None = None, count: int = 64) -> Groups:
    return Groups.build(asked, asked.world.sp_sizes, edges, count)


def menus(asked: PlanRequest, groups: Groups) -> Sequence[Sequence[Setting]]:
    return ranked(asked, asked.world.sp_sizes, groups.sizes, groups.counts)


def enumerated(asked: PlanRequest, shape: tuple[int, ...], count: int) -> dict[int, tuple[Fraction, int, int]]:
    """For each p: least p T / b over all b and all r that fit, with its b and T; Eq. 1 and 6 written out."""
    found: dict[int, tuple[Fraction, int, int]] = {}
    (layers,), limits = asked.cost.num_layers, asked.limits
    depths = {"full": [layers], "none": [0], "auto": list(range(layers + 1))}[limits.recompute]
    for p in asked.world.sp_sizes:
        padded = pad([shape], p)
        for b in range(1, min(count, limits.max_batch_size or count) + 1):
            if limits.max_tokens is not None and b * int(np.prod(padded)) // p > limits.max_tokens:
                continue
            fitting = [r for r in depths if asked.cost.bytes(b, padded, p, (r,)) <= limits.memory_bytes]
            for r in fitting[:1]:
                time = asked.cost.nanoseconds(b, padded, p, (r,))
                found[p] = min(found.get(p, (Fraction(2**62), 0, 0)), (Fraction(p * time, b), b, time))
    return found


@pytest.mark.parametrize("policy", ["full", "auto", "none"])
@pytest.mark.parametrize("memory", [8 * MiB, 60 * MiB, 400 * MiB])
@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 5}, {"max_tokens": 3000}])
def test_settings_are_those_of_most_throughput_over_every_integer_b(
    policy: str, memory: int, limits: dict[str, Any]
) -> None:
    asked = request(texts(1), 8, memory=memory, recompute=policy, **limits)
    sizes, counts = np.asarray([[s] for s in LENGTHS[:-1]]), np.full(len(LENGTHS) - 1, 24)
    compared = 0
    for shape, menu in zip(sizes.tolist(), ranked(asked, asked.world.sp_sizes, sizes, counts), strict=True):
        wanted = enumerated(asked, tuple(shape), 24)
        assert {s.sp_size for s in menu} == set(wanted)
        for s in menu:
            share = Fraction(s.sp_size * s.nanoseconds, s.batch_size)
            assert share <= wanted[s.sp_size][0] * Fraction(1002, 1000)
            compared += 1
        shares = [Fraction(s.sp_size * s.nanoseconds, s.batch_size) for s in menu]
        assert shares == sorted(shares)
    assert compared > 20


def test_the_memory_is_used_up_as_long_as_larger_batches_gain() -> None:
    # Launches are shared by a batch; up to 8 samples were measured, beyond them time is in proportion.
    asked = request(texts(*[300] * 500), 1, memory=15 * MiB, recompute="full")
    ((best, *_),) = menus(asked, groups_of(asked))
    assert 1 < best.batch_size < 8
    assert asked.cost.bytes(best.batch_size, (300,), 1, (4,)) <= 15 * MiB
    assert asked.cost.bytes(best.batch_size + 1, (300,), 1, (4,)) > 15 * MiB
    # Where nothing is gained the shorter micro-batch balances better.
    roomy = request(texts(*[300] * 500), 1, memory=60 * MiB, recompute="full")
    assert menus(roomy, groups_of(roomy))[0][0].batch_size == 8


def test_fewest_recomputed_layers_are_never_slower_than_all() -> None:
    faster = 0
    for memory in (8 * MiB, 20 * MiB, 60 * MiB, 400 * MiB):
        asked = request(texts(*LENGTHS[:-1]), 8, memory=memory)
        groups = groups_of(asked, EDGES)
        intra, inter = menus(asked, groups), menus(with_policy(asked, "full"), groups)
        for size, fewest, all_ in zip(groups.sizes, intra, inter, strict=True):
            # Algorithm 1 as meant compares throughput, so each setting of inter is among those that it sees.
            assert fewest[0].sp_size * fewest[0].nanoseconds * all_[0].batch_size <= (
                all_[0].sp_size * all_[0].nanoseconds * fewest[0].batch_size * 1.002
            )
            for p, b, time in all_:
                same_batch = asked.cost.settings(p, np.asarray(b), padded_tokens(size, p), memory)
                assert same_batch.nanoseconds <= time
                faster += int(same_batch.nanoseconds) < time
    assert faster > 50


def test_algorithm_1_as_printed_stops_at_the_first_layer_that_fits() -> None:
    memory, layers, padded = 400 * MiB, 4, (300,)
    asked = request(texts(*[300] * 8), 1, memory=memory)
    held, all_ = (asked.cost.bytes(8, padded, 1, (r,)) for r in (2, 3))
    one_layer = held - all_
    # Line 9 to 14: r counts layers that keep their activations, and the loop ends at the first that fits.
    printed = next(
        r for r in range(1, layers + 1) if asked.cost.bytes(8, padded, 1, (4,)) + r * one_layer <= memory
    )
    assert printed == 1
    # Its text: the minimal number of recomputed layers under the capacity, which is none here.
    ((best,),) = menus(asked, groups_of(asked))
    assert best == (1, 8, asked.cost.nanoseconds(8, padded, 1, (0,)))
    assert best.nanoseconds < asked.cost.nanoseconds(8, padded, 1, (layers - printed,))


def test_shorter_batches_are_the_largest_within_a_time() -> None:
    asked = with_policy(request(texts(1), 8, memory=60 * MiB), "full")
    sizes, counts = np.asarray([[s] for s in EDGES]), np.full(len(EDGES), 200)
    menus = Menus.build(asked, (1, 2, 4, 8), sizes, counts)
    longest = max(menu[0].nanoseconds for menu in menus.best)
    for limit in (longest, longest // 2, longest // 7, longest // 100, 1):
        for k, menu in enumerate(menus.within(limit).best):
            for s in menu:
                (full,) = (best for best in menus.best[k] if best.sp_size == s.sp_size)
                assert 1 <= s.batch_size <= full.batch_size
                exact = asked.cost.settings(s.sp_size, np.asarray(s.batch_size), sizes[k, 0], 60 * MiB, "full")
                if EDGES[k] % s.sp_size == 0 and EDGES[k] > 2 * s.sp_size:
                    assert s.nanoseconds == pytest.approx(int(exact.nanoseconds), rel=1e-6)
                if s.nanoseconds <= limit and s.batch_size < full.batch_size:
                    more, _ = largest_batches(asked, s.sp_size, sizes[[k]], counts[[k]], np.asarray([limit]))
                    assert s.batch_size in (more[0, 0], more[0, 0] - 1)
            if menu[0].nanoseconds > limit:
                # Nothing ends in time: the fastest single sample.
                (only,) = menu
                assert only.batch_size == 1
    everything = max(s.nanoseconds for menu in menus.best for s in menu)
    assert menus.within(everything).best == menus.best


def test_a_curve_of_groups_that_fit_nothing_is_empty() -> None:
    asked = request(texts(1), 2, memory=2 * MiB)
    curve = Curve.build(asked, 2, np.asarray([[5000], [6000]]), np.asarray([3, 3]))
    assert curve.best() == curve.within(10**9, {}) == {}
    curve = Curve.build(asked, 2, np.asarray([[5000], [20], [6000]]), np.asarray([3, 3, 3]))
    assert list(curve.best()) == list(curve.within(10**12, {0: 1, 1: 3})) == [1]


def test_algorithm_1_compares_throughput_and_not_seconds_as_printed() -> None:
    asked = request(texts(*[300] * 40), 4)
    ((best, *_),) = menus(asked, groups_of(asked))
    # By seconds one sample alone on all ranks would win.
    assert asked.cost.nanoseconds(1, (300,), 4, (0,)) < best.nanoseconds
    assert best.batch_size > 1


def test_samples_that_the_edges_part_are_never_in_one_group() -> None:
    asked = request(texts(5, 50, 10, 51, 49, 7, 500), 2)
    groups = groups_of(asked, [10, 50, 100])
    members = [groups.members(k).tolist() for k in range(4)]
    assert members == [[0, 2, 5], [1, 4], [3], [6]]  # each in the order offered; 500 is above the last edge
    assert groups.sizes[:, 0].tolist() == [10, 50, 51, 500]
    assert groups.counts.tolist() == [3, 2, 1, 1]
    assert groups.tokens.tolist() == [0, 5, 15, 22, 72, 121, 172, 672]


def test_at_most_so_many_groups_are_found_and_they_are_ranges() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 500).astype(int) + 1
    asked = request(texts(*lengths.tolist()), 2, memory=2**40)
    for count in (1, 5, 64):
        groups = groups_of(asked, None, count)
        assert len(groups.counts) <= count
        ranges = [
            (lengths[groups.members(k)].min(), lengths[groups.members(k)].max()) for k in range(len(groups.counts))
        ]
        assert all(high < low for (_, high), (low, _) in pairwise(ranges))
        assert sorted(i for k in range(len(groups.counts)) for i in groups.members(k).tolist()) == list(range(500))


def test_shapes_that_would_pad_each_other_on_another_axis_are_apart() -> None:
    shapes = [(8, 4), (1, 32), (8, 4), (2, 32), (7, 4)]
    groups = groups_of(request(shapes, 1, cost=COST_2D))
    for k in range(len(groups.counts)):
        assert len({shapes[i][1] for i in groups.members(k).tolist()}) == 1


def test_a_group_whose_sizes_together_fit_nothing_is_taken_apart() -> None:
    # More than 8 widths share ranges; together (9, 99) and (90, 91) would be (90, 99).
    shapes = [(1, w) for w in range(1, 99, 5)] + [(9, 99), (90, 91)]
    need = max(COST_2D.bytes(1, shape, 1, (1, 2)) for shape in shapes)
    asked = request(shapes, 1, cost=COST_2D, memory=need)
    groups = groups_of(asked, [1, 20_000])
    assert (90, 91) in set(map(tuple, groups.sizes.tolist()))
    assert all(menus(asked, groups))


def test_exact_shapes_are_groups_of_their_own() -> None:
    asked = request([(8, 4), (8, 4), (9, 4), (8, 5)], 2, cost=COST_2D, exact_shapes=True)
    groups = groups_of(asked)
    assert sorted(map(tuple, groups.sizes.tolist())) == [(8, 4), (8, 5), (9, 4)]
    for size, menu in zip(groups.sizes.tolist(), menus(asked, groups), strict=True):
        assert [s.sp_size for s in sorted(menu)] == ([1, 2] if size[0] == 8 else [1])


def test_a_sample_that_fits_nothing_is_named() -> None:
    asked = request(texts(10, 200_000, 20, 300_000), 4, memory=20 * MiB)
    with pytest.raises(InfeasibleError, match="sample 11 of shape"):
        groups_of(asked)
    with pytest.raises(InfeasibleError, match="sample 12 of shape"):
        groups_of(replace(request(texts(1, 1, 9000), 1), limits=replace(asked.limits, max_tokens=100)))
