"""Hours, and the fewest ranks that meet a deadline."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_dcp.permutation import permutation
from lightning_dcp.planners import Static
from lightning_dcp.simulate import hours_needed, own_work, simulate, smallest_world
from tests.test_simulate import CLUSTER, LENGTHS, run


def worlds(ranks_per_node: int, largest: int) -> list[int]:
    """Every number of ranks that the search may answer with."""
    inside = [w for w in (1, 2, 4, 8, 16, 32, 64) if w < ranks_per_node]
    return [*inside, *range(ranks_per_node, largest + 1, ranks_per_node)]


@pytest.mark.parametrize("ranks_per_node", [1, 4, 6, 8])
def test_the_fewest_ranks_are_those_of_a_full_search(ranks_per_node: int) -> None:
    rng = random.Random(ranks_per_node)
    for _ in range(50):
        serial, deadline = rng.uniform(0.0, 0.3), rng.uniform(0.31, 400.0)
        minimum = rng.choice([1, 1, 5, 20])

        def hours_at(w: int, serial: float = serial, minimum: int = minimum) -> float:
            return serial + 100.0 / w if w >= minimum else float("inf")

        found = smallest_world(hours_at, deadline, ranks_per_node, 4096)
        fitting = [w for w in worlds(ranks_per_node, 4096) if hours_at(w) <= deadline]
        assert found.world_size == (min(fitting) if fitting else None)
        assert dict(found.tried) == {w: hours_at(w) for w, _ in found.tried}
        assert [w for w, _ in found.tried] == sorted(w for w, _ in found.tried)
        assert len(found.tried) <= 26, "doubling and halving, not one by one"
        if found.world_size:
            assert found.hours == hours_at(found.world_size)


def test_the_search_ends_where_more_ranks_gain_nothing() -> None:
    asked: list[int] = []

    def hours_at(w: int) -> float:
        asked.append(w)
        return max(100.0 / w, 5.0)

    found = smallest_world(hours_at, 4.0, 8)
    assert found.world_size is None
    assert found.hours == 5.0
    assert max(asked) == 64
    assert len(asked) == len({*asked})


def test_ranks_that_cannot_hold_a_sample_do_not_end_the_search() -> None:
    found = smallest_world(lambda w: 80.0 / w if w >= 24 else float("inf"), 4.0, 8)
    assert found.world_size == 24
    assert dict(found.tried)[16] == float("inf")
    nothing = smallest_world(lambda w: float("inf"), 4.0, 8, largest=64)
    assert (nothing.world_size, nothing.hours) == (None, float("inf"))


def test_hours_follow_from_the_samples_own_work() -> None:
    """Few long samples take most of the time: the share of useful time says more of other steps than tokens do."""
    result, _ = run(Static())
    assert result.work == own_work(CLUSTER.cost, LENGTHS[permutation(0, 0, 100)[:30], None]).sum()
    assert hours_needed(result, 3600 * result.work) == pytest.approx(result.seconds)
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 1.3, 800).astype(int), 8, 16_000)
    total = float(own_work(CLUSTER.cost, lengths[:, None]).sum())
    seconds = simulate(lengths, CLUSTER, Static(), steps=20, global_batch_size=40).seconds
    by_work, by_tokens = [], []
    for seed in range(1, 11):
        few = simulate(lengths, CLUSTER, Static(), steps=3, global_batch_size=40, seed=seed)
        by_work.append(3600 * hours_needed(few, total) / seconds - 1)
        by_tokens.append(lengths.sum() / few.tokens_per_second / seconds - 1)
    assert np.linalg.norm(by_work) < 0.7 * np.linalg.norm(by_tokens)


def test_own_work_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = own_work(CLUSTER.cost, LENGTHS[:, None])
    assert whole.tolist() == CLUSTER.cost.useful_time(LENGTHS).tolist()
    monkeypatch.setattr("lightning_dcp.simulate.price._CHUNK", 7)
    assert own_work(CLUSTER.cost, LENGTHS[:, None]).tolist() == whole.tolist()
