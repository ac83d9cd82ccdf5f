"""Length groups: least padding, exact on small data, fast on large."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.lengths import length_groups, representatives


def padding(tokens: Any, edges: tuple[int, ...]) -> int:
    tokens, ends = np.asarray(tokens), np.asarray(edges)
    return int((ends[np.searchsorted(ends, tokens)] - tokens).sum())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 5))
def test_edges_lose_least_to_padding(lengths: list[int], count: int) -> None:
    edges = length_groups(lengths, count)
    assert list(edges) == sorted(set(edges))
    assert set(edges) <= set(lengths)
    assert len(edges) <= count
    assert edges[-1] == max(lengths)
    unique = sorted(set(lengths))
    inner = [c for k in range(count) for c in combinations(unique[:-1], k)]
    assert padding(lengths, edges) == min(padding(lengths, (*c, unique[-1])) for c in inner)


def test_by_hand() -> None:
    assert length_groups([10, 10, 10, 11, 100, 90], 2) == (11, 100)
    assert length_groups([10, 10, 10, 11, 100, 90], 3) == (11, 90, 100)
    assert length_groups([10, 10, 10, 11, 100, 90]) == (10, 11, 90, 100)
    assert length_groups([7]) == (7,)
    assert length_groups([5, 9], 1) == (9,)


def test_several_axes_count_by_tokens() -> None:
    shapes = [(2, 3), (3, 2), (4, 4), (1, 30)]
    assert length_groups(shapes, 2) == (16, 30) or padding([6, 6, 16, 30], length_groups(shapes, 2)) <= 20
    assert length_groups(shapes) == (6, 16, 30)
    assert length_groups(np.asarray(shapes)) == (6, 16, 30)


def test_order_and_container_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 5000, 4000)
    edges = length_groups(lengths)
    assert length_groups(rng.permutation(lengths)) == edges
    assert length_groups(lengths.tolist()) == edges
    assert length_groups(lengths[:, None]) == edges
    assert length_groups(lengths.astype(np.int32)) == edges


@pytest.mark.timeout(60)  # anything quadratic in the lengths would never end
def test_a_million_lengths_close_to_exact() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7.0, 1.5, 10**6).astype(np.int64) + 1
    edges = length_groups(lengths)
    assert len(edges) == 64
    assert edges[-1] == lengths.max()
    assert padding(lengths, edges) / lengths.sum() < 0.07
    equal_counts = tuple(np.unique(np.quantile(lengths, np.linspace(0, 1, 65)[1:], method="higher")).tolist())
    assert padding(lengths, edges) < 0.5 * padding(lengths, equal_counts)


def test_binned_candidates_lose_at_most_the_documented_share() -> None:
    """Exact cuts of 3000 different lengths by the plain recurrence, against the binned ones."""
    lengths = np.unique(np.random.default_rng(1).integers(1, 200_000, 3000))
    edges = length_groups(lengths, 4)
    count, mass = np.arange(1, len(lengths) + 1), np.cumsum(lengths)
    best = lengths * count - mass
    for _ in range(3):
        total = best[:, None] + lengths * (count - count[:, None]) - (mass - mass[:, None])
        best = np.minimum(best, np.where(np.tri(len(lengths), k=-1).T > 0, total, 2**62).min(axis=0))
    padded = int(best[-1]) + int(lengths.sum())
    assert int(best[-1]) <= padding(lengths, edges) <= int(best[-1]) + 0.01 * padded


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least one sample"),
        ([0, 3], "integers from 1"),
        ([-4], "integers from 1"),
        ([1.5, 2.0], "integers from 1"),
        ([True, True], "integers from 1"),
        ([[[1]]], "one number or one shape"),
        (["a"], "integers from 1"),
    ],
)
def test_bad_lengths_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        length_groups(lengths)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_number_of_groups(count: int) -> None:
    with pytest.raises(ValueError, match="allowed are 1 to 64"):
        length_groups([1, 2], count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=80), st.integers(1, 9))
def test_representatives_hold_the_ends(lengths: list[int], count: int) -> None:
    found = representatives(lengths, count)
    assert 1 <= len(found) <= count
    assert list(found) == sorted(set(found))
    assert {shape[0] for shape in found} <= set(lengths)
    assert found[-1] == (max(lengths),)
    if count > 1:
        assert found[0] == (length_groups(lengths)[0],)


def test_representatives_of_several_axes_are_shapes_of_the_data() -> None:
    shapes = [(2, 6), (6, 2), (6, 2), (4, 4), (1, 40), (40, 1), (9, 9)]
    assert representatives(shapes, 9) == ((6, 2), (4, 4), (1, 40), (9, 9))
    assert representatives(shapes, 1) == ((9, 9),)
    assert representatives(shapes[::-1], 9) == representatives(shapes, 9)
    with pytest.raises(ValueError, match="count is 0"):
        representatives(shapes, 0)
