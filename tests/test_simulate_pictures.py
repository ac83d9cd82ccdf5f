"""The pictures of a simulation: what is drawn where, and what cannot be written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners import Balanced, Static
from lightning_dcp.simulate import compare
from lightning_dcp.simulate.pictures import check_path, draw, started, timeline, weak_scaling
from tests.test_simulate import CLUSTER, LENGTHS


def micro_batch(first_id: int, nanoseconds: int, first_rank: int = 0, sp_size: int = 1) -> MicroBatch:
    return MicroBatch(
        sample_ids=(first_id,),
        shapes=((8,),),
        padded_shape=(8,),
        first_rank=first_rank,
        sp_size=sp_size,
        nanoseconds=nanoseconds,
        bytes=1,
    )


PARTS = (
    micro_batch(0, 30),
    micro_batch(1, 10, 1),
    micro_batch(2, 100, 0, 2),
    micro_batch(3, 20),
    micro_batch(4, 5, 1),
)
PLAN = IterationPlan(world_size=3, micro_batches=PARTS, lower_bound=120)


def test_micro_batches_start_when_their_ranks_are_free() -> None:
    assert {m.sample_ids[0]: start for m, start in started(PLAN)} == {2: 0, 0: 100, 1: 100, 3: 130, 4: 110}


def test_in_lockstep_they_start_with_their_round() -> None:
    plan = replace(PLAN, lockstep=True)
    assert plan.rounds() == [100, 30, 20]
    assert {m.sample_ids[0]: start for m, start in started(plan)} == {2: 0, 0: 100, 1: 100, 3: 130, 4: 130}


def test_starts_are_those_of_every_rank() -> None:
    plans: list[IterationPlan] = []
    compare(
        np.append(LENGTHS[:50], [9_000] * 5),
        CLUSTER,
        [Balanced()],
        steps=3,
        global_batch_size=20,
        on_step=lambda label, step, plan: plans.append(plan),
    )
    assert any(m.sp_size > 1 for plan in plans for m in plan.micro_batches)
    for plan in plans:
        begins = {m.sample_ids: start for m, start in started(plan)}
        for rank in range(4):
            mine = plan.of_rank(rank)
            assert [begins[m.sample_ids] for m in mine[:1]] == [0] * len(mine[:1])
            for before, after in pairwise(mine):
                assert begins[after.sample_ids] == begins[before.sample_ids] + before.nanoseconds


def test_a_timeline_has_one_box_for_every_micro_batch() -> None:
    axes: Any = Figure().subplots()
    timeline(axes, PLAN, "mine", {1: "red", 2: "blue"}, 2e-7)
    idle, work = axes.collections
    (corners,) = (path.vertices for path in idle.get_paths())
    assert np.allclose([corners[:, 0].max(), corners[:, 1].max()], [130e-9 + 20e-9, 3])
    boxes = {
        tuple(np.round([*p.vertices.min(axis=0) * [1e9, 1], *p.vertices.max(axis=0) * [1e9, 1]]).astype(int))
        for p in work.get_paths()
    }
    assert boxes == {(0, 0, 100, 2), (100, 0, 130, 1), (100, 1, 110, 2), (130, 0, 150, 1), (110, 1, 115, 2)}
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([120e-9])
    assert "mine: step of 5 samples" in axes.get_title(loc="left")


def test_weak_scaling_shows_tokens_per_second_of_a_rank() -> None:
    axes: Any = Figure().subplots()
    weak_scaling(axes, {"a": [(8, 80.0), (32, 240.0)], "b": [(8, 40.0), (32, 160.0)]})
    assert [list(line.get_ydata()) for line in axes.lines] == [[10.0, 7.5], [5.0, 5.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_the_whole_picture_is_written(tmp_path: Path) -> None:
    plans: dict[str, IterationPlan] = {}
    results = compare(
        LENGTHS,
        CLUSTER,
        [Balanced(), Static()],
        steps=2,
        global_batch_size=20,
        on_step=lambda label, step, plan: plans.setdefault(label, plan),
    )
    sizes = []
    for scaling in ({}, {"balanced": [(2, 10.0), (4, 20.0)]}):
        path = tmp_path / f"{len(scaling)}.png"
        draw(results, plans, scaling, path)
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(header[20:24], "big"))
    assert sizes[1] > sizes[0] + 300, "weak scaling has a part of its own"


@pytest.mark.parametrize("path", ["x.unknown", "x", "nowhere/x.png"])
def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"no picture that can be written; .*\.png"):
        check_path(tmp_path / path)
    check_path(tmp_path / "x.PNG")
