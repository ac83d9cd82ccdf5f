"""The benchmarks of the paper's figures: small runs of each, and the results and documentation that are kept."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.figures import figure_4, figure_5, figure_8, figure_9, figure_10
from benchmarks.figures.__main__ import FIGURES
from benchmarks.figures.common import MODELS, RESULTS, Result, load, main
from benchmarks.figures.document import DOCUMENT, filled

NAMES = tuple(figure.name for figure in FIGURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a quick run of all figures left its files."""
    path = tmp_path_factory.mktemp("figures")
    main(FIGURES, ["--quick", "--no-progress", "--output", str(path)])
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_leaves_a_picture_and_says_how_it_was_made(folder: Path, name: str) -> None:
    result = json.loads((folder / f"{name}.json").read_text())
    assert result["figure"] == name
    assert result["quick"]
    assert result["date"]
    assert result["machine"]["processor"]
    assert result["settings"]
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figure_4_planners_idle_less_the_more_they_know(folder: Path) -> None:
    for row in load("figure_4", folder)["results"]:
        idle = [row[name]["idle_ratio"] for name in figure_4.PLANNERS]
        assert idle[-1] == min(idle)
        assert all(0.0 <= value < 1.0 for value in idle)


def test_figure_5_exchanges_cost_more_on_wider_groups_and_less_for_long_samples(folder: Path) -> None:
    overhead = load("figure_5", folder)["results"]["overhead"]
    by_size = [overhead[p] for p in sorted(overhead, key=int)]
    for narrow, wide in pairwise(by_size):
        assert all(a < b for a, b in zip(narrow, wide, strict=True))
    for values in by_size:
        assert 0.0 < values[-1] < values[0]
    assert len(by_size[0]) == len(figure_5.LENGTHS)


def test_figure_8_trains_every_sample_once_and_puts_the_planners_in_order(folder: Path) -> None:
    result = load("figure_8", folder)
    for each in result["results"]:
        assert {found["samples"] for found in each["planners"].values()} == {each["samples"]}
        assert len({found["tokens"] for found in each["planners"].values()}) == 1
    # So few steps leave time idle whoever plans them.
    assert [line for line in figure_8.shortfalls(result) if "idles" not in line] == []


def test_figure_8_says_what_does_not_hold(folder: Path) -> None:
    result = load("figure_8", folder)
    planners = result["results"][0]["planners"]
    planners["dcp-inter"]["tokens_per_second"] = 0.9 * planners["bucket"]["tokens_per_second"]
    planners["static"]["samples_dropped"] = 1
    found = figure_8.shortfalls(result)
    assert "Transformer-1D, short: `dcp-inter` reaches 90.0 % of `bucket`" in found
    assert "Transformer-1D, short: `static` drops or repeats samples" in found
    assert "90.0 % of `bucket`" in figure_8.table(result)


def test_figure_9_scales(folder: Path) -> None:
    result = load("figure_9", folder)
    for model in MODELS:
        for data_set in ("balanced", "long"):
            assert figure_9.of_linear(figure_9.rows_of(result, model, "balanced", data_set))[-1] >= 0.95


def test_figure_10_less_recompute_never_loses(folder: Path) -> None:
    rows = load("figure_10", folder)["results"]
    assert [row["tokens"] for row in rows] == list(figure_10.LENGTHS)
    assert all(row["gain"] >= 0.0 for row in rows)


def _kept(name: str) -> Result:
    result = load(name, RESULTS)
    assert not result["quick"]
    return result


def test_the_kept_results_hold_what_the_documentation_claims() -> None:
    assert figure_8.shortfalls(_kept("figure_8")) == []
    scaling = _kept("figure_9")
    for model in MODELS:
        for name, data_set in figure_9.CASES:
            shares = figure_9.of_linear(figure_9.rows_of(scaling, model, name, data_set))
            assert len(shares) == len(figure_9.WORLD_SIZES)
            assert name != "balanced" or shares[-1] >= 0.95


def test_the_documentation_shows_the_kept_results() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert filled(text) == text
    for name in NAMES:
        assert f"results/{name}.png" in text
        assert (RESULTS / f"{name}.png").exists()
