"""The cost model: Eq. 4 to 6 at the measured points, monotone and safe between and beyond them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.cost import INFEASIBLE, CostModel, RecomputePolicy
from lightning_dcp.profile import Measurement, Profile, ProfileError
from tests.synthetic import analytic_cost, analytic_measurement, analytic_profile

MiB = 1 << 20


def measurement(batch_size: int = 1, tokens: int = 100, families: int = 1, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "batch_size": batch_size,
        "shape": (tokens,),
        "sp_size": 1,
        "forward": (10,) * families,
        "backward": (20,) * families,
        "recompute": (9,) * families,
        "activation_bytes": (100,) * families,
        "input_bytes": (10,) * families,
        "constant_time": 5,
        "constant_bytes": 50,
    }
    return Measurement(**{**values, **changes})


def profile(*rows: Measurement, num_layers: tuple[int, ...] = (3,), static_bytes: int = 7) -> Profile:
    return Profile(identity={"a": "b"}, num_layers=num_layers, static_bytes=static_bytes, measurements=rows)


def only_constant(*points: tuple[int, int, int]) -> CostModel:
    """A model whose time is ``constant_time`` alone, given at ``(batch size, tokens, nanoseconds)``."""
    rows = [
        measurement(b, s, forward=(0,), backward=(0,), recompute=(0,), constant_time=time) for b, s, time in points
    ]
    return CostModel(profile(*rows))


@st.composite
def noisy_profiles(draw: st.DrawFn) -> Profile:
    """Ragged grids with values in any order."""
    families = draw(st.integers(1, 2))
    value = st.integers(0, draw(st.sampled_from([50, 10**6, 2**50])))
    column = st.tuples(*[value] * families)
    points = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400)), min_size=1, max_size=7, unique=True))
    rows = tuple(
        measurement(
            b,
            s,
            forward=draw(column),
            backward=draw(column),
            recompute=draw(column),
            activation_bytes=draw(column),
            input_bytes=draw(column),
            constant_time=draw(value),
            constant_bytes=draw(value),
        )
        for b, s in points
    )
    layers = tuple(draw(st.integers(1, 4)) for _ in range(families))
    return profile(*rows, num_layers=layers, static_bytes=draw(st.integers(0, 1000)))


# Eq. 4 to 6


def test_equations_by_hand() -> None:
    cost = CostModel(profile(measurement()))
    plain = 3 * (10 + 20) + 5
    assert [cost.nanoseconds(1, (100,), 1, (r,)) for r in range(4)] == [plain + 9 * r for r in range(4)]
    # Eq. 6 for r < L; a whole layer comes on top once no plain layer is left.
    assert [cost.bytes(1, (100,), 1, (r,)) for r in range(3)] == [
        (3 - r) * 100 + r * 10 + 50 + 7 for r in range(3)
    ]
    assert cost.bytes(1, (100,), 1, (3,)) == 3 * 10 + 100 + 50 + 7


def test_two_families_by_hand() -> None:
    row = measurement(
        families=2,
        forward=(10, 1),
        backward=(20, 2),
        recompute=(9, 3),
        activation_bytes=(100, 40),
        input_bytes=(10, 4),
    )
    cost = CostModel(profile(row, num_layers=(3, 2)))
    assert cost.nanoseconds(1, (100,), 1, (2, 1)) == 3 * 30 + 2 * 9 + 2 * 3 + 1 * 3 + 5
    assert cost.bytes(1, (100,), 1, (2, 1)) == (100 + 2 * 10) + (40 + 4) + 50 + 7
    assert cost.bytes(1, (100,), 1, (3, 2)) == 3 * 10 + 2 * 4 + 100 + 50 + 7
    assert cost.nanoseconds(1, (100,), 1, ()) == cost.nanoseconds(1, (100,), 1, (0, 0))


@pytest.mark.parametrize("num_layers", [(4,), (3, 2)])
def test_exact_at_every_measured_point(num_layers: tuple[int, ...]) -> None:
    shapes = ((6, 5), (40, 5), (40, 50), (9, 900))
    measured = analytic_profile((1, 2, 4), num_layers, shapes=shapes, batch_sizes=(1, 3, 8))
    cost = CostModel(measured)
    for m in measured.measurements:
        for r in product(*[range(n + 1) for n in num_layers]):
            layers = range(len(num_layers))
            time = m.constant_time + sum(
                num_layers[f] * (m.forward[f] + m.backward[f]) + r[f] * m.recompute[f] for f in layers
            )
            held = sum((num_layers[f] - r[f]) * m.activation_bytes[f] + r[f] * m.input_bytes[f] for f in layers)
            whole = max([m.activation_bytes[f] for f in layers if r[f] == num_layers[f]], default=0)
            assert cost.nanoseconds(m.batch_size, m.shape, m.sp_size, r) == time
            memory = held + whole + m.constant_bytes + measured.static_bytes
            assert cost.bytes(m.batch_size, m.shape, m.sp_size, r) == memory


def test_of_two_shapes_of_equal_tokens_the_dearer_counts() -> None:
    rows = (
        measurement(shape=(20, 5), constant_time=8, constant_bytes=1),
        measurement(shape=(5, 20), constant_time=6, constant_bytes=2),
    )
    for order in (rows, rows[::-1]):
        cost = CostModel(profile(*order))
        assert cost.nanoseconds(1, (100, 1), 1, (0,)) == 3 * 30 + 8
        assert cost.bytes(1, (10, 10), 1, (0,)) == 3 * 100 + 2 + 7


def test_lines_between_the_points() -> None:
    cost = only_constant((1, 100, 10), (1, 200, 30), (3, 100, 50), (3, 200, 90))
    assert cost.nanoseconds(1, (150,), 1, (0,)) == 20
    assert cost.nanoseconds(2, (100,), 1, (0,)) == 30
    assert cost.nanoseconds(2, (150,), 1, (0,)) == 45


# Between, beyond, ragged


def test_beyond_the_longest_the_last_line_but_not_below_proportion() -> None:
    steep = only_constant((1, 100, 10), (1, 200, 90))
    assert steep.nanoseconds(1, (300,), 1, (0,)) == 170
    flat = only_constant((1, 100, 80), (1, 200, 90))
    assert flat.nanoseconds(1, (300,), 1, (0,)) == 135


def test_below_the_shortest_the_first_line_but_not_below_proportion() -> None:
    flat = only_constant((1, 100, 80), (1, 200, 90))
    assert flat.nanoseconds(1, (50,), 1, (0,)) == 75
    steep = only_constant((1, 100, 10), (1, 200, 90))
    assert steep.nanoseconds(1, (50,), 1, (0,)) == 5


def test_beyond_the_largest_batch_the_last_line_but_not_below_proportion() -> None:
    fixed = only_constant((1, 100, 90), (2, 100, 100))
    assert fixed.nanoseconds(4, (100,), 1, (0,)) == 200
    growing = only_constant((1, 100, 10), (2, 100, 100))
    assert growing.nanoseconds(4, (100,), 1, (0,)) == 280
    assert only_constant((1, 100, 10)).nanoseconds(7, (100,), 1, (0,)) == 70


def test_ragged_grid() -> None:
    """The long probe ran with one sample only; what is missing follows the known batch sizes of its length."""
    cost = only_constant((1, 100, 10), (2, 100, 20), (8, 100, 80), (1, 400, 60), (2, 400, 110))
    # The line gives 410, proportion 440.
    assert cost.nanoseconds(8, (400,), 1, (0,)) == 440
    assert cost.nanoseconds(2, (400,), 1, (0,)) == 110
    middle = only_constant((1, 100, 10), (3, 100, 30), (2, 200, 50))
    assert middle.nanoseconds(2, (100,), 1, (0,)) == 20
    assert middle.nanoseconds(1, (200,), 1, (0,)) == 25
    assert middle.nanoseconds(3, (200,), 1, (0,)) == 75
    batched = only_constant((4, 100, 40), (8, 100, 60))
    assert batched.nanoseconds(1, (100,), 1, (0,)) == 25


def test_each_sp_size_has_its_own_points() -> None:
    rows = (measurement(tokens=100), measurement(tokens=1000, sp_size=2, constant_time=77))
    cost = CostModel(profile(*rows))
    assert cost.sp_sizes == (1, 2)
    assert cost.nanoseconds(1, (1000,), 2, (0,)) == 3 * 30 + 77
    assert cost.nanoseconds(1, (1000,), 1, (0,)) == 10 * (3 * 30 + 5)


@settings(max_examples=150, deadline=None)
@given(noisy_profiles(), st.data())
def test_never_falls_with_length_or_batch_size(measured: Profile, data: st.DataObject) -> None:
    cost = CostModel(measured)
    batch = np.asarray(sorted(data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))))[:, None]
    token = np.asarray(sorted(data.draw(st.lists(st.integers(0, 2000), min_size=2, max_size=8))))[None]
    counts = tuple(data.draw(st.integers(0, n)) for n in measured.num_layers)
    shapes = [[(int(b), (int(s),)) for s in token[0]] for b in batch[:, 0]]
    tables = [
        np.asarray([[f(b, s, 1, counts) for b, s in row] for row in shapes])
        for f in (cost.nanoseconds, cost.bytes)
    ]
    limit = data.draw(st.sampled_from([int(tables[1].min()), int(np.median(tables[1])), int(tables[1].max())]))
    policies: tuple[RecomputePolicy, ...] = ("auto", "none", "full")
    for policy in policies:
        tables.append(cost.settings(1, batch, token, limit, policy).nanoseconds)
    for table in tables:
        assert (np.diff(table, axis=0) >= 0).all()
        assert (np.diff(table, axis=1) >= 0).all()
        assert table.min() >= 0


def test_extrapolation_is_monotone_where_lines_would_cross() -> None:
    longer = only_constant((1, 100, 0), (1, 200, 100), (2, 100, 100), (2, 200, 100))
    assert [longer.nanoseconds(b, (300,), 1, (0,)) for b in (1, 2)] == [200, 200]
    larger = only_constant((1, 100, 0), (2, 100, 200), (1, 200, 200), (2, 200, 200))
    assert [larger.nanoseconds(4, (s,), 1, (0,)) for s in (100, 200)] == [600, 600]
    shorter = only_constant((1, 100, 100), (1, 200, 100), (2, 100, 100), (2, 200, 1000))
    assert [shorter.nanoseconds(b, (10,), 1, (0,)) for b in (1, 2)] == [100, 100]


def test_a_measurement_that_falls_is_raised_to_its_neighbour() -> None:
    cost = only_constant((1, 100, 50), (1, 200, 40), (2, 100, 30))
    assert cost.nanoseconds(1, (200,), 1, (0,)) == 50
    assert cost.nanoseconds(2, (100,), 1, (0,)) == 50


def test_no_number_wraps_around() -> None:
    big = measurement(tokens=1_000_000, forward=(10**12,), backward=(10**12,), recompute=(10**12,))
    small = measurement(tokens=1000, forward=(10**9,), backward=(10**9,), recompute=(10**9,))
    cost = CostModel(profile(small, big, num_layers=(100,)))
    for tokens in (999, 1001, 500_000, 999_999, 1_000_000):
        exact = 10**9 + (10**12 - 10**9) * (tokens - 1000) // 999_000
        expected = max(2 * exact, 2 * 10**9 * tokens // 1000) if tokens < 1000 else 2 * exact
        assert cost.nanoseconds(1, (tokens,), 1, (0,)) == pytest.approx(100 * expected + 5, abs=300)
    assert cost.nanoseconds(8, (1_000_000,), 1, (100,)) == 100 * (16 + 8) * 10**12 + 40
    largest = replace(big, shape=(1,), forward=(2**49,), backward=(2**49,), activation_bytes=(2**50,))
    cost = CostModel(profile(largest, num_layers=(1024,), static_bytes=2**50))
    for b, s in ((1, 1), (10**6, 10**6), (2**31 - 1, 2**31 - 1)):
        assert 2**59 < cost.nanoseconds(b, (s,), 1, (1024,)) < INFEASIBLE
        assert 2**59 < cost.bytes(b, (s,), 1, (0,)) < INFEASIBLE


def test_questions_out_of_range_are_refused() -> None:
    cost = CostModel(profile(measurement()))
    for b, s in ((0, 1), (1, 2**31), (2**31, 1), (-1, 5)):
        with pytest.raises(ValueError, match="allowed are batch sizes from 1"):
            cost.nanoseconds(b, (s,), 1, (0,))
    with pytest.raises(ValueError, match=r"size 2 was not profiled; the profile has \(1,\)"):
        cost.bytes(1, (1,), 2, (0,))
    for counts in ((4,), (-1,), (0, 0)):
        with pytest.raises(ValueError, match="allowed are counts from 0 up to"):
            cost.nanoseconds(1, (1,), 1, counts)


# Recompute


def brute_force(cost: CostModel, b: int, s: int, limit: int) -> tuple[int, int] | None:
    """Least time within the limit, and of equal times the fewest recomputed layers."""
    found = [
        (cost.nanoseconds(b, (s,), 1, r), sum(r))
        for r in product(*[range(n + 1) for n in cost.num_layers])
        if cost.bytes(b, (s,), 1, r) <= limit
    ]
    return min(found, default=None)


@settings(max_examples=120, deadline=None)
@given(noisy_profiles(), st.data())
def test_settings_equal_brute_force(measured: Profile, data: st.DataObject) -> None:
    cost = CostModel(measured)
    b, s = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 600))
    memory = sorted({cost.bytes(b, (s,), 1, r) for r in product(*[range(n + 1) for n in measured.num_layers])})
    limit = data.draw(st.sampled_from(memory)) + data.draw(st.integers(-1, 1))
    found = cost.settings(1, np.asarray(b), np.asarray(s), limit)
    best = brute_force(cost, b, s, limit)
    counts = tuple(int(r) for r in found.recompute)
    assert int(found.bytes) == cost.bytes(b, (s,), 1, counts)
    if best is None:
        assert int(found.nanoseconds) == INFEASIBLE
        assert int(found.bytes) == memory[0], "what does not fit is reported with the least it could need"
    else:
        assert (int(found.nanoseconds), sum(counts)) == best
        assert int(found.bytes) <= limit


def test_settings_of_three_families_equal_brute_force() -> None:
    cost = CostModel(analytic_profile((1,), (3, 2, 4), shapes=((10,), (100,))))
    for limit in range(MiB, 4 * MiB, 100_000):
        found = cost.settings(1, np.asarray([1, 4]), np.asarray([70, 55]), limit)
        for k, (b, s) in enumerate(((1, 70), (4, 55))):
            best = brute_force(cost, b, s, limit)
            assert int(found.nanoseconds[k]) == (INFEASIBLE if best is None else best[0])


def test_many_families_are_searched_in_steps_and_stay_monotone() -> None:
    cost = CostModel(analytic_profile((1,), (40, 40, 40), shapes=((10,), (100,))))
    roomy = cost.bytes(1, (100,), 1, (20, 20, 20))
    found = cost.settings(1, np.asarray(1), np.arange(80, 400, 8), roomy)
    assert found.nanoseconds[0] < INFEASIBLE
    assert (np.diff(found.nanoseconds) >= 0).all()
    assert (found.bytes[found.nanoseconds < INFEASIBLE] <= roomy).all()


def test_policies() -> None:
    cost = CostModel(profile(measurement()))
    one, hundred = np.asarray(1), np.asarray(100)
    none = cost.settings(1, one, hundred, 300, "none")
    assert (int(none.nanoseconds), int(none.bytes), none.recompute.tolist()) == (INFEASIBLE, 357, [0])
    full = cost.settings(1, one, hundred, 300, "full")
    assert (int(full.nanoseconds), int(full.bytes), full.recompute.tolist()) == (122, 187, [3])
    auto = cost.settings(1, one, hundred, 300, "auto")
    assert (int(auto.nanoseconds), int(auto.bytes), auto.recompute.tolist()) == (104, 267, [1])


def test_algorithm_1_means_the_fewest_recomputed_layers() -> None:
    """As printed, ``r`` counts layers that are NOT recomputed and the loop stops at the first that fits.

    Meant (text of 3.4): the fewest recomputed layers that fit, with T = T_full - (L - r) t_f.
    """
    row = measurement(recompute=(10,))
    cost = CostModel(profile(row))
    layers, forward, activation = 3, row.forward[0], row.activation_bytes[0]
    limit = 2 * 100 + 10 + 50 + 7
    full_time = cost.nanoseconds(1, (100,), 1, (layers,))
    full_memory = layers * row.input_bytes[0] + row.constant_bytes + 7
    printed = next(r for r in range(1, layers + 1) if full_memory + r * activation <= limit)
    found = cost.settings(1, np.asarray(1), np.asarray(100), limit)
    assert found.recompute.tolist() == [1]
    assert int(found.nanoseconds) == full_time - (layers - 1) * forward
    assert printed == 1
    assert int(found.nanoseconds) < full_time - printed * forward, "the printed loop keeps one layer where two fit"


def test_a_model_without_repeated_layers() -> None:
    row = measurement(forward=(), backward=(), recompute=(), activation_bytes=(), input_bytes=())
    cost = CostModel(profile(row, num_layers=()))
    found = cost.settings(1, np.asarray([1, 2]), np.asarray(100), 60)
    assert found.nanoseconds.tolist() == [5, INFEASIBLE]
    assert found.recompute.shape == (2, 0)


# What the lower bound asks


@settings(max_examples=150, deadline=None)
@given(noisy_profiles(), st.data())
def test_least_share_is_below_every_batch_size_of_the_range(measured: Profile, data: st.DataObject) -> None:
    cost = CostModel(measured)
    starts = cost.batch_sizes(40)
    ranges = list(zip(starts, [*(b - 1 for b in starts[1:]), 40], strict=True))
    low, high = data.draw(st.sampled_from(ranges))
    tokens = data.draw(st.integers(1, 900))
    memory = [cost.bytes(b, (tokens,), 1, ()) for b in (low, high)]
    limit = data.draw(st.sampled_from([memory[0], sum(memory) // 2, memory[1]]))
    policy: RecomputePolicy = data.draw(st.sampled_from(("auto", "none", "full")))
    first, share = cost.least_share(1, (np.asarray(low), np.asarray(high)), np.asarray(tokens), limit, policy)
    batch = np.arange(low, high + 1)
    exact = cost.settings(1, batch, np.asarray(tokens), limit, policy).nanoseconds
    assert int(first) == int(exact[0])
    fitting = exact < INFEASIBLE
    assert (int(share) <= exact[fitting] // batch[fitting]).all()
    if low == high and fitting.all():
        assert int(share) == int(exact[0]) // low
    if fitting.all() and int(exact[0]) < 2**40:
        ends = min(int(exact[0]) // low, int(exact[-1]) // high)
        loss = 2 * sum(measured.num_layers) + 2
        recomputed = policy == "auto" and int(
            cost.settings(1, batch[-1:], np.asarray(tokens), limit).recompute.sum()
        )
        assert recomputed or int(share) >= ends - loss, "looser than rounding explains"


def test_least_share_covers_the_rounding_inside_the_range() -> None:
    """Two quantities grow by half a nanosecond a sample: even batch sizes lose nothing, odd ones a nanosecond."""
    rows = [
        measurement(b, forward=(b // 2,), backward=(0,), recompute=(0,), constant_time=b // 2) for b in (2, 100)
    ]
    cost = CostModel(profile(*rows, num_layers=(1,)))
    exact = [cost.nanoseconds(b, (100,), 1, (0,)) // b for b in (16, 17, 18)]
    assert exact == [1, 0, 1]
    assert int(cost.least_share(1, (np.asarray(16), np.asarray(18)), np.asarray(100), 10**9)[1]) == 0


def test_batch_sizes_start_dense_and_hold_the_measured_ones() -> None:
    cost = CostModel(profile(measurement(1), measurement(9), measurement(100)))
    sizes = cost.batch_sizes(130)
    assert sizes[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert {9, 100, 128} <= set(sizes)
    assert list(sizes) == sorted(set(sizes))
    assert max(b / a for a, b in pairwise(sizes[7:])) <= 1.25
    assert cost.batch_sizes(3) == (1, 2, 3)


# Profiles


@pytest.mark.parametrize("num_layers", [(4,), (3, 2)])
def test_profile_json_both_ways(num_layers: tuple[int, ...]) -> None:
    measured = analytic_profile((1, 2), num_layers, shapes=((4, 3), (8, 3)))
    assert Profile.from_json(measured.to_json()) == measured


def edited(path: tuple[Any, ...], value: Any) -> str:
    content = json.loads(profile(measurement()).to_json())
    node = content
    for key in path[:-1]:
        node = node[key]
    if value is KeyError:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return json.dumps(content)


ROW = ("measurements", 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "lightning_dcp.plan"}',
        edited(("num_layers",), KeyError),
        edited(("num_layers",), 3),
        edited(("num_layers",), [3.0]),
        edited(("num_layers",), [True]),
        edited(("num_layers",), [0]),
        edited(("num_layers",), [2000]),
        edited(("num_layers",), [3, 3]),
        edited(("static_bytes",), -1),
        edited(("static_bytes",), "7"),
        edited(("static_bytes",), float("inf")),
        edited(("static_bytes",), 2**60),
        edited(("identity",), []),
        edited(("identity",), {"a": 1}),
        edited(("more",), 1),
        edited(("measurements",), []),
        edited(("measurements",), {}),
        edited(("measurements",), [1]),
        edited(("measurements",), ["a"]),
        edited(("measurements",), "ab"),
        edited((*ROW, "forward"), KeyError),
        edited((*ROW, "forward"), 10),
        edited((*ROW, "forward"), [10.5]),
        edited((*ROW, "forward"), [True]),
        edited((*ROW, "forward"), [-1]),
        edited((*ROW, "forward"), [[10]]),
        edited((*ROW, "forward"), [10, 10]),
        edited((*ROW, "forward"), [2**51]),
        edited((*ROW, "forward"), [float("nan")]),
        edited((*ROW, "batch_size"), [1]),
        edited((*ROW, "batch_size"), 0),
        edited((*ROW, "shape"), 100),
        edited((*ROW, "shape"), []),
        edited((*ROW, "shape"), [2**20, 2**20]),
        edited((*ROW, "sp_size"), 0),
        edited((*ROW, "more"), 1),
    ],
)
def test_foreign_or_damaged_profiles_are_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text)


def test_measurements_of_different_axes_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"shapes of \[1, 2\] axes"):
        profile(measurement(), measurement(shape=(2, 2)))


def test_differing_names_the_fields() -> None:
    measured = profile(measurement())
    assert measured.differing({"a": "b"}) == []
    assert measured.differing({"a": "c", "torch": "2"}) == ["a: b / c", "torch: - / 2"]
    assert measured.max_tokens == 100


def test_the_analytic_profile_is_monotone_and_wide_groups_pay() -> None:
    """The other tests stand on it."""
    cost = analytic_cost()
    times = [cost.nanoseconds(1, (16384,), p, (0,)) for p in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert all(p * t > times[0] for p, t in zip((2, 4), times[1:], strict=True))
    assert analytic_measurement(2, (8,), 1, 2).forward == (106_432, 212_864)


# Packed rows


def packed_time(cost: CostModel, p: int, *lengths: int) -> int:
    return cost.packed_row(p, lengths, (0,))[0]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_packed_row_of_one_sample_costs_what_the_sample_costs(p: int) -> None:
    cost = analytic_cost()
    for length in (8, 64, 100, 700, 4096):
        alone = cost.nanoseconds(1, (length,), p, (0,)), cost.bytes(1, (length,), p, (0,))
        assert np.abs(np.subtract(cost.packed_row(p, [length], (0,)), alone)).max() <= 50, "rounded for each layer"


def test_packing_shares_the_fixed_cost_and_attends_within_samples_only() -> None:
    cost = analytic_cost()
    fixed = packed_time(cost, 1)
    parts = packed_time(cost, 1, 256), packed_time(cost, 1, 1024)
    assert packed_time(cost, 1, 256, 1024) == sum(parts) - fixed
    whole = packed_time(cost, 1, 4096)
    halves, quarters = packed_time(cost, 1, 2048, 2048), packed_time(cost, 1, *[1024] * 4)
    assert quarters < halves < whole, "attention grows with the square of each sample's own length"


def test_short_samples_are_not_free_in_a_packed_row() -> None:
    """Alone they cost no more than an empty row, as the launches take all the time; many of them do cost."""
    cost = only_constant((1, 8, 1000), (1, 16, 1000), (64, 8, 3560), (64, 16, 7000))
    assert packed_time(cost, 1) == 1000
    assert packed_time(cost, 1, *[8] * 100) == 1000 + 100 * 40
    assert packed_time(cost, 1, *[16] * 100) >= 1000 + 100 * 93


def test_packed_settings_equal_the_row_with_fewest_recomputed_layers() -> None:
    cost = analytic_cost()
    lengths = [700, 300, 45, 2000]
    parts = cost.packed_parts(2, np.asarray(lengths)).sum(axis=0)
    most = cost.packed_row(2, lengths, (0,))[1]
    seen = set()
    for limit in range(most, most // 3, -most // 40):
        found = cost.packed(2, parts, limit)
        fitting = [r for r in range(5) if cost.packed_row(2, lengths, (r,))[1] <= limit]
        if not fitting:
            assert int(found.nanoseconds) == INFEASIBLE
            continue
        recompute = tuple(found.recompute.tolist())
        assert recompute == (fitting[0],)
        assert (int(found.nanoseconds), int(found.bytes)) == cost.packed_row(2, lengths, recompute)
        seen.add(recompute)
    assert seen == {(r,) for r in range(4)}, "with all layers recomputed one whole layer is held all the same"


@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=8), more=st.integers(0, 500))
def test_packed_rows_never_fall_with_length_or_samples(lengths: list[int], more: int) -> None:
    cost = analytic_cost()
    for p in (1, 4):
        row = np.asarray(cost.packed_row(p, lengths, (1,)))
        assert (row <= cost.packed_row(p, [*lengths[:-1], lengths[-1] + more], (1,))).all()
        assert (row <= cost.packed_row(p, [*lengths, 1 + more], (1,))).all()


def test_useful_time_leaves_out_what_no_sample_is_trained_by() -> None:
    cost = analytic_cost((1, 4))
    lengths = np.asarray([64, 1024])
    useful = cost.useful_time(lengths)
    assert useful.tolist() == [packed_time(cost, 1, n) - packed_time(cost, 1) for n in (64, 1024)]
    # On a larger smallest group the same work is counted over its ranks.
    on_four = analytic_cost((4,)).useful_time(lengths)
    assert (on_four > useful).all(), "with the exchanges, where no single rank was measured"
