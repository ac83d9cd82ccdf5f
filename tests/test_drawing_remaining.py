"""What is left of an epoch that is drawn from."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lightning_dcp.data.remaining import Remaining


def test_against_a_plain_list() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        size = int(rng.integers(1, 40))
        model, left = list(range(size)), Remaining(size)
        while model:
            count = int(rng.integers(1, 12))
            offered = left.offer(count)
            assert offered.tolist() == model[:count]
            # The first one always, and any of the others.
            chosen = [p for p in offered.tolist() if p == model[0] or rng.random() < 0.4]
            left.take(rng.permutation(np.asarray(chosen)))
            model = [p for p in model if p not in chosen]
            assert left.left == len(model)
            assert left.places().tolist() == model
            assert left.position == (model[0] if model else size)
            had = sorted(set(range(left.position, size)) - set(model))
            assert left.beyond.tolist() == had
            again = Remaining(size, left.position, left.beyond)
            assert again.places().tolist() == model
            assert again.offer(7).tolist() == model[:7]


def test_a_copy_is_taken_from_on_its_own() -> None:
    left = Remaining(10)
    left.take(np.asarray([0, 4]))
    twin = left.copy()
    twin.take(np.asarray([1, 9]))
    assert left.places().tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert twin.places().tolist() == [2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("places", [[0], [3], [12], [-1], [2, 2], [1, 12]])
def test_only_what_is_left_can_be_taken(places: list[int]) -> None:
    left = Remaining(12, 1, [3, 4])
    before = left.places().tolist()
    with pytest.raises(ValueError, match=r"the places \[.*\] are not left"):
        left.take(np.asarray(places))
    assert left.places().tolist() == before


def test_nothing_is_left_of_an_epoch_that_is_over() -> None:
    left = Remaining(5, 5)
    assert (left.left, left.position, left.beyond.tolist(), left.offer(3).tolist()) == (0, 5, [], [])
    with pytest.raises(ValueError, match="are not left"):
        left.take(np.asarray([4]))


@pytest.mark.parametrize(
    ("position", "beyond"), [(-1, []), (6, []), (2, [2]), (2, [1]), (2, [4, 3]), (2, [3, 3]), (2, [5]), (5, [5])]
)
def test_a_damaged_state_is_refused(position: int, beyond: list[int]) -> None:
    with pytest.raises(ValueError, match=f"position {position} with"):
        Remaining(5, position, beyond)


def test_memory_follows_the_window_and_not_the_epoch() -> None:
    tracemalloc.start()
    left = Remaining(10**9)
    for _ in range(50):
        left.take(left.offer(4096)[::2])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert left.left == 10**9 - 50 * 2048
    # Three arrays of one window and its mask; the epoch would be a gigabyte.
    assert peak < 500_000
