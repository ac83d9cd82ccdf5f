"""The closing table and the timeline, from plans made by hand whose numbers can be checked by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.report import (
    StepReport,
    measured_idle,
    most_varied,
    planned_spans,
    plot_timeline,
    plot_waterfall,
    summary_table,
)


def _micro_batch(first_id: int, milliseconds: int, **changes: Any) -> MicroBatch:
    values: dict[str, Any] = {
        "sample_ids": (first_id, first_id + 1),
        "shapes": ((6,), (8,)),
        "padded_shape": (8,),
        "first_rank": 0,
        "sp_size": 1,
        "recompute": (0,),
        "nanoseconds": milliseconds * 1_000_000,
        "bytes": 1,
    }
    return MicroBatch(**values | changes)


def _plan() -> IterationPlan:
    """Rank 0: 100 ms together with rank 1, then 30 and 20 ms; rank 1: then 10 ms. Plan order is not run order."""
    return IterationPlan(
        world_size=2,
        micro_batches=(
            _micro_batch(0, 30),
            _micro_batch(2, 10, first_rank=1),
            _micro_batch(4, 100, sp_size=2, recompute=(3,)),
            _micro_batch(6, 20),
        ),
        lower_bound=125_000_000,
    )


WATERFALL = {
    "useful": 0.4, "padding": 0.05, "recompute": 0.05, "sequence_parallel": 0.1, "idle": 0.2, "update": 0.1,
    "data": 0.05, "other": 0.05,
}  # fmt: skip
SPANS = [[(5.0, 5.1), (5.1, 5.14), (5.14, 5.17)], [(5.0, 5.1), (5.12, 5.14)]]


def test_planned_spans_follow_the_order_of_the_ranks() -> None:
    first, second = planned_spans(_plan())
    assert np.allclose(first, [(0.0, 0.1), (0.1, 0.13), (0.13, 0.15)])
    assert np.allclose(second, [(0.0, 0.1), (0.1, 0.11)])
    empty = IterationPlan(world_size=2, micro_batches=(_micro_batch(0, 1),))
    assert planned_spans(empty)[1] == []


def test_idle_counts_every_rank_and_every_gap() -> None:
    assert measured_idle(SPANS) == pytest.approx(1.0 - (0.17 + 0.12) / (2 * 0.17))
    assert measured_idle([[(0.0, 1.0)], []]) == pytest.approx(0.5)
    assert measured_idle([[], []]) == 0.0


def test_table_weighs_steps_by_their_length() -> None:
    short = IterationPlan(world_size=2, micro_batches=(_micro_batch(0, 50, shapes=((8,), (8,))),))
    table = summary_table(
        [StepReport(plan=_plan(), seconds=3.0, idle=0.1), StepReport(plan=short, seconds=1.0, idle=0.5)],
        loss_before=5.54321,
        loss_after=2.0,
    )
    rows = {line[:24].strip(): line[24:] for line in table.splitlines()}
    assert rows == {
        "held-out loss": "5.5432 before, 2.0000 after",
        "steps": "2 in 4.0 s, 10 samples",
        "tokens per second": "18",
        # busy 150 + 110 + 50 of 2 * (150 + 50) ms
        "idle": "22.5% planned, 20.0% measured",
        "padding": "10.0% of the computed tokens",
        "gap to the lower bound": "20.0% on the whole, 20.0% in the worst step",
        "steps with p =": "1: 2, 2: 1",
        "steps with g =": "0: 1, 1: 1, 2: 1, 3: 1",
        "steps with r =": "0: 2, 3: 1",
    }


def test_table_ends_with_where_the_time_went() -> None:
    table = summary_table([StepReport(plan=_plan(), seconds=3.0)], waterfall=WATERFALL)
    assert " ".join(table.split()).endswith(
        "time of all ranks 40.0% useful, 5.0% padding, 5.0% recompute, 10.0% sequence parallelism, 20.0% idle, "
        "10.0% optimizer and sync, 5.0% waiting for data, 5.0% callbacks and loop"
    )


def test_table_says_what_is_not_known() -> None:
    plan = IterationPlan(world_size=1, micro_batches=(_micro_batch(0, 5, recompute=(1, 2)),))
    table = summary_table([StepReport(plan=plan, seconds=1.0)])
    assert "held-out loss" not in table
    assert "0.0% planned, not measured" in table
    assert "the planner gave none" in table
    assert "1+2: 1" in table
    with pytest.raises(ValueError, match="no step was recorded"):
        summary_table([])
    with pytest.raises(ValueError, match="longer than zero"):
        StepReport(plan=plan, seconds=0.0)


def test_long_rows_stay_readable() -> None:
    plans = [
        IterationPlan(world_size=1, micro_batches=tuple(_micro_batch(2 * i, 1) for i in range(n)))
        for n in range(1, 60)
    ]
    table = summary_table([StepReport(plan=plan, seconds=1.0) for plan in plans])
    assert max(len(line) for line in table.splitlines()) <= 100
    assert "59: 1" in table


@pytest.mark.timeout(60)  # work in ranks times micro-batches times steps would take minutes
def test_table_of_a_long_run_on_many_ranks() -> None:
    rows = tuple(_micro_batch(2 * i, 1, first_rank=i % 512) for i in range(1024))
    plan = IterationPlan(world_size=512, micro_batches=rows)
    table = summary_table([StepReport(plan=plan, seconds=1.0)] * 100)
    assert "steps with g =          2: 100" in table


def test_most_varied_step_is_chosen() -> None:
    plain = IterationPlan(world_size=2, micro_batches=(_micro_batch(0, 5),))
    deep = IterationPlan(world_size=2, micro_batches=(_micro_batch(0, 5), _micro_batch(2, 5, recompute=(1,))))
    assert most_varied([plain, _plan(), deep]) == 1
    assert most_varied([plain, deep, plain]) == 1
    assert most_varied([plain, plain]) == 0
    with pytest.raises(ValueError, match="no step was recorded"):
        most_varied([])


def test_timeline_shows_both_sizes_and_the_idle_time(tmp_path: Path) -> None:
    import matplotlib.image

    path = tmp_path / "step.png"
    plot_timeline(_plan(), SPANS, path)
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] > 1200
    half = pixels.shape[0] // 2
    for part in (pixels[:half], pixels[half:]):
        for colour in ("56B4E9", "E69F00", "e4e4e4"):
            wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
            assert (part == wanted).all(axis=-1).sum() > 500, colour


def test_timeline_refuses_spans_of_another_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"spans of \[3, 1\] micro-batches per rank; the plan has \[3, 2\]"):
        plot_timeline(_plan(), [SPANS[0], SPANS[1][:1]], tmp_path / "step.png")


def test_waterfall_shows_what_is_useful_and_what_is_lost(tmp_path: Path) -> None:
    import matplotlib.image

    path = tmp_path / "waterfall.png"
    plot_waterfall(WATERFALL, path)
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    areas = []
    for colour in ("009E73", "E69F00"):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
        areas.append(int((pixels == wanted).all(axis=-1).sum()))
    assert areas[0] / sum(areas) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("shares", [{}, {**WATERFALL, "idle": 0.5}, {**WATERFALL, "more": 0.0}])
def test_waterfall_that_does_not_add_up_is_refused(shares: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needed are useful, padding, .*Take DCPCallback.waterfall\(\) after"):
        plot_waterfall(shares, tmp_path / "waterfall.png")


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "lightning_dcp._timeline", raising=False)
    with pytest.raises(ImportError, match=r"lightning-dcp\[plots\]"):
        plot_timeline(_plan(), SPANS, tmp_path / "step.png")
    monkeypatch.delitem(sys.modules, "lightning_dcp._waterfall", raising=False)
    with pytest.raises(ImportError, match=r"lightning-dcp\[plots\]"):
        plot_waterfall(WATERFALL, tmp_path / "waterfall.png")


def test_report_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, lightning_dcp.report; print({'torch', 'lightning', 'matplotlib'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )
