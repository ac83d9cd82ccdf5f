"""The planning benchmark: heuristics that plan every sample within the limits, goals, a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.heuristics import HEURISTICS, bucket, first_fit, grouped
from benchmarks.planning import SIZES, Case, cases, measure, run, table
from benchmarks.planning_picture import draw
from benchmarks.reference import lognormal_lengths, reference_profile, reference_request
from lightning_dcp.cost import CostModel
from lightning_dcp.planners.bound import padded_lower_bound

COST = CostModel(reference_profile())


def padded_time(length: int, batch_size: int, sp_size: int) -> int:
    tokens = np.asarray(-(-length // sp_size) * sp_size)
    return int(COST.settings(sp_size, np.asarray(batch_size), tokens, 2**40).nanoseconds)


def test_heuristics_by_hand() -> None:
    # Two samples fill one rank, the third goes to the other: 6000 tokens per micro-batch, two ranks.
    asked = reference_request(2, np.asarray([3000, 3000, 2500]), packing=False, cost=COST)
    assert first_fit(asked) == padded_time(3000, 2, 1)
    # One at a time on both ranks is shorter here than one at a time on each.
    assert bucket(asked) == 2 * padded_time(3000, 1, 2) + padded_time(2500, 1, 2)
    assert bucket(asked) < padded_time(3000, 1, 1) + padded_time(2500, 1, 1)
    assert grouped(asked) == padded_time(3000, 2, 1)
    # A sample of two ranks' tokens comes first on both of them.
    asked = reference_request(2, np.asarray([500, 9000]), packing=False, cost=COST)
    assert first_fit(asked) == grouped(asked) == padded_time(9000, 1, 2) + padded_time(500, 1, 1)
    assert bucket(asked) == padded_time(9000, 1, 2) + padded_time(500, 1, 2)


@pytest.mark.parametrize("name", sorted(HEURISTICS))
def test_no_heuristic_beats_the_bound(name: str) -> None:
    for seed in range(3):
        lengths = lognormal_lengths(48, 700, 1.4, seed, 8)
        asked = reference_request(8, lengths, packing=False, cost=COST)
        assert HEURISTICS[name](asked) >= padded_lower_bound(asked)


def test_every_case_of_the_goals_is_measured() -> None:
    chosen = cases(quick=False)
    for packing in (True, False):
        for median, sigma in ((1340, 1.0), (1340, 1.8), (245, 1.0), (245, 1.8)):
            found = [
                c for c in chosen if (c.packing, c.median, c.sigma, c.compared) == (packing, median, sigma, True)
            ]
            assert [(c.world_size, c.samples) for c in found] == list(SIZES)
            assert not packing or {c.seeds for c in found} == {20}
    goals = {(c.median, c.samples): c.goal() for c in chosen if c.packing and c.compared}
    assert goals[1340, 512] == (0.01, 0.03)
    assert goals[1340, 8192] == (0.02, float("inf"))
    assert goals[245, 64] == (0.04, float("inf"))


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    chosen = [
        Case(world_size=2, samples=8, median=245, sigma=1.0, packing=packing, seeds=2, compared=compared)
        for packing, compared in ((True, True), (False, True), (True, False), (False, False))
    ]
    result = json.loads(json.dumps(run(chosen)))
    assert [case["packing"] for case in result["cases"]] == [True, False, True, False]
    padded = result["cases"][1]
    assert set(padded["heuristics"]) == set(HEURISTICS)
    assert 0 <= padded["bound_gap"] <= padded["gap"] + 1e-12
    assert padded["ahead_least"] <= padded["ahead"]
    assert len(table(result).splitlines()) == 2 + len(chosen)
    draw(result, tmp_path / "planning.png")
    assert (tmp_path / "planning.png").stat().st_size > 10_000


def test_a_missed_goal_is_told() -> None:
    # One long sample per rank and nothing to fill up with: no plan is near the bound.
    case = Case(world_size=3, samples=4, median=1340, sigma=1.0, packing=True, seeds=3, compared=True)
    found = measure(case, COST, 1.0, lambda: None)
    assert found["gap"] > 0.01
    assert found["missed"] == ["gap"]
