"""The choice of g: equal to brute force over all combinations, and what the paper says of G_min and G_max."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from lightning_dcp.planners.grouped.accumulation import Kinds, equal, micro_batches, share

Batch = tuple[int, int, int]
"""Nanoseconds, sp_size, most micro-batches."""


def kinds(batches: Sequence[Batch], counts: Sequence[int] | None = None) -> Kinds:
    times, widths, supply = (np.asarray(column, dtype=np.int64) for column in zip(*batches, strict=True))
    return Kinds(
        nanoseconds=times,
        sp_sizes=widths,
        counts=np.asarray(counts or [1] * len(batches), dtype=np.int64),
        supply=supply,
    )


def idle(batches: Sequence[Batch], totals: Sequence[int], last: int, world_size: int, ranks: int) -> Fraction:
    """Eq. 3 with each group counted p times, as a share of W times C; straight from the design."""
    busy = sum(p * g * t for (t, p, _), g in zip(batches, totals, strict=True))
    return Fraction(ranks * last - busy, world_size * last)


def brute_force(batches: Sequence[Batch], world_size: int, factor: float) -> tuple[Fraction, int]:
    """Idle ratio and length of the step to take, over all combinations of g."""
    cap = max(int(factor * max(t for t, _, _ in batches)), max(t for t, _, _ in batches))
    ranks = sum(p for _, p, _ in batches)
    found = []
    for chosen in product(*[range(1, most + 1) for _, _, most in batches]):
        last = max(g * t for g, (t, _, _) in zip(chosen, batches, strict=True))
        if last <= cap:
            found.append((idle(batches, chosen, last, world_size, ranks), last))
    least = min(ratio for ratio, _ in found)
    shortest = min(last for ratio, last in found if ratio <= least + Fraction(1, 200))
    return min(pair for pair in found if pair[1] == shortest)


def random_case(rng: random.Random) -> tuple[list[Batch], int, float]:
    batches: list[Batch] = [
        (rng.randint(1, rng.choice([10, 1000, 10**9])), rng.choice([1, 1, 2, 3, 4, 8]), rng.randint(1, 6))
        for _ in range(rng.randint(1, 4))
    ]
    world_size = sum(p for _, p, _ in batches) + rng.choice([0, 0, 1])
    return batches, world_size, rng.choice([1.0, 1.5, 2.0, 4.0, 100.0])


def test_equals_brute_force_over_all_combinations() -> None:
    rng = random.Random(3)
    moved = 0
    for _ in range(1000):
        batches, world_size, factor = random_case(rng)
        totals, last = micro_batches(kinds(batches), world_size, factor)
        wanted, shortest = brute_force(batches, world_size, factor)
        ranks = sum(p for _, p, _ in batches)
        assert last == shortest
        assert idle(batches, totals.tolist(), last, world_size, ranks) == wanted
        assert all(1 <= g <= most for g, (_, _, most) in zip(totals.tolist(), batches, strict=True))
        moved += max(totals.tolist()) > 1
    assert moved > 500  # the cases are not all decided by their caps


def test_equal_batches_share_a_supply_as_brute_force_shares_it() -> None:
    rng = random.Random(4)
    for _ in range(200):
        kind: list[Batch] = [(rng.randint(1, 30), rng.choice([1, 2, 4]), 0) for _ in range(2)]
        counts = [rng.randint(1, 2) for _ in kind]
        supply = [n + rng.randint(0, 5) for n in counts]
        factor = rng.choice([1.0, 2.0, 5.0])
        batches = [k for k, n in zip(kind, counts, strict=True) for _ in range(n)]
        owner = [k for k, n in enumerate(counts) for _ in range(n)]
        world_size = sum(p for _, p, _ in batches)
        cap = int(factor * max(t for t, _, _ in batches))
        found = []
        for chosen in product(range(1, 7), repeat=len(batches)):
            sums = [sum(g for g, o in zip(chosen, owner, strict=True) if o == k) for k in range(2)]
            last = max(g * t for g, (t, _, _) in zip(chosen, batches, strict=True))
            if last <= cap and all(s <= most for s, most in zip(sums, supply, strict=True)):
                found.append((idle(batches, chosen, last, world_size, world_size), last))
        shortest = min(last for ratio, last in found if ratio <= min(found)[0] + Fraction(1, 200))
        given = [(t, p, most) for (t, p, _), most in zip(kind, supply, strict=True)]
        totals, last = micro_batches(kinds(given, counts), world_size, factor)
        each = [g for total, n in zip(totals.tolist(), counts, strict=True) for g in share(total, n)]
        assert last == shortest == max(g * t for g, (t, _, _) in zip(each, batches, strict=True))
        assert (idle(batches, each, last, world_size, world_size), last) == min(
            f for f in found if f[1] == shortest
        )


def test_a_wide_group_counts_once_for_each_of_its_ranks() -> None:
    # Eq. 3 as printed counts a batch once, whatever ranks it holds, and would stop at C = 15, where 8 of the 10 ranks
    # idle for a third of the step.
    batches = [(10, 8, 9), (7, 1, 9), (15, 1, 1)]
    totals, last = micro_batches(kinds(batches), 10, 2.0)
    left = {c: [c - min(most, c // t) * t for t, _, most in batches] for c in (15, 20, 21, 28, 30)}
    printed = {c: sum(seconds) for c, seconds in left.items()}
    weighted = {
        c: Fraction(sum(p * x for x, (_, p, _) in zip(left[c], batches, strict=True)), 10 * c) for c in left
    }
    assert min(printed, key=lambda c: printed[c]) == 15
    assert min(weighted, key=lambda c: weighted[c]) == last
    assert last != 15
    assert totals.tolist() == [last // 10, last // 7, 1]


def test_the_ratio_is_made_least_and_not_the_idle_seconds() -> None:
    # The idle seconds of Eq. 3 are least for the shortest step of all.
    batches = [(30, 1, 9), (29, 1, 9), (7, 1, 99)]
    targets = {g * t for t, _, _ in batches for g in range(1, 18) if 30 <= g * t <= 120}
    seconds = {c: sum(c - c // t * t for t, _, _ in batches) for c in targets}
    assert min(seconds, key=lambda c: seconds[c]) == 30
    last = micro_batches(kinds(batches), 3, 4.0)[1]
    assert last > 30
    assert seconds[last] * 30 < seconds[30] * last


def test_of_targets_within_half_a_point_the_shortest_is_taken() -> None:
    # C = 1000: idle 0.4 %; C = 249000 would idle nothing.
    batches = [(1000, 1, 500), (992, 1, 500)]
    totals, last = micro_batches(kinds(batches), 2, 1000.0)
    assert (totals.tolist(), last) == ([1, 1], 1000)
    # One more nanosecond of the half point and it is no longer allowed.
    assert micro_batches(kinds([(1000, 1, 500), (989, 1, 500)]), 2, 1000.0)[1] > 1000


def test_g_max_bounds_the_step_by_its_longest_micro_batch_and_not_g() -> None:
    batches = [(1000, 1, 50), (7, 1, 10_000)]
    totals, last = micro_batches(kinds(batches), 2, 1.0)
    assert last == 1000
    assert totals.tolist() == [1, 142]  # Appendix C: no cap on g itself
    for factor in (1.0, 1.9, 2.0, 3.7):
        assert micro_batches(kinds([(700, 2, 50), (333, 1, 50)]), 3, factor)[1] <= factor * 700


def test_a_g_max_below_one_still_lets_every_batch_run_once() -> None:
    totals, last = micro_batches(kinds([(9, 1, 5), (4, 1, 5)]), 2, 0.1)
    assert (totals.tolist(), last) == ([1, 2], 9)


def test_g_min_multiplies_all_by_the_same_factor_only_when_all_are_below_it() -> None:
    batches = [(100, 1, 99), (50, 1, 99)]
    assert micro_batches(kinds(batches), 2, 1.0)[0].tolist() == [1, 2]
    assert micro_batches(kinds(batches), 2, 1.0, 2)[0].tolist() == [1, 2]
    # ceil(5 / 2) = 3, also beyond G_max; the balance stays what it was.
    totals, last = micro_batches(kinds(batches), 2, 1.0, 5)
    assert (totals.tolist(), last) == ([3, 6], 300)
    assert micro_batches(kinds([(100, 1, 2), (50, 1, 99)]), 2, 1.0, 5)[0].tolist() == [2, 6]


@pytest.mark.parametrize("factor", [1e18, 1e300])
def test_a_g_max_beyond_all_samples_is_no_limit(factor: float) -> None:
    batches = [(700_000_001, 2, 50), (333, 1, 50)]
    totals, last = micro_batches(kinds(batches), 3, factor)
    wanted, _ = micro_batches(kinds(batches), 3, 100.0)
    assert totals.tolist() == wanted.tolist()
    assert last == int(totals[0]) * 700_000_001


@pytest.mark.parametrize("g_min", [10**6, 2**62, 2**62 + 1, 10**30])
def test_a_g_min_beyond_all_samples_takes_them_all(g_min: int) -> None:
    given = kinds([(100, 1, 9), (50, 1, 8)], counts=[2, 4])
    for totals, last in (micro_batches(given, 6, 1.0, g_min), equal(given, g_min)):
        assert totals.tolist() == [9, 8]
        assert last == 500


def test_many_batches_of_many_kinds_stay_within_the_bounds() -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(1024, np.full(64, 1 / 64)) + 1
    many = Kinds(
        nanoseconds=rng.integers(10**6, 10**9, 64),
        sp_sizes=rng.choice([1, 2, 4, 8], 64),
        counts=counts,
        supply=counts * rng.integers(1, 200, 64),
    )
    world_size = int((many.counts * many.sp_sizes).sum())
    totals, last = micro_batches(many, world_size, 4.0)
    assert ((totals >= many.counts) & (totals <= many.supply)).all()
    assert last == (-(-totals // many.counts) * many.nanoseconds).max() <= 4 * many.nanoseconds.max()


@pytest.mark.parametrize("supply", [[1, 0], [2, 1]])
def test_batches_without_a_micro_batch_are_refused(supply: list[int]) -> None:
    with pytest.raises(ValueError, match="one micro-batch for each batch"):
        kinds([(3, 1, supply[0]), (4, 1, supply[1])], counts=[1, 2])


def test_shares_are_even_and_add_up() -> None:
    for total in range(1, 20):
        for count in range(1, total + 1):
            parts = share(total, count)
            assert sum(parts) == total
            assert max(parts) - min(parts) <= 1
            assert max(parts) == -(-total // count)
