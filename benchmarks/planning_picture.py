"""The picture of :mod:`benchmarks.planning`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "balanced": "#009E73",
    "grouped": "#E69F00",
    "bucket": "#D55E00",
    "first-fit": "#56B4E9",
}
RANKS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#222222")
Cases = Sequence[dict[str, Any]]


def draw(result: dict[str, Any], path: Path) -> None:
    """Four panels: gap with packing, gap without it beside heuristics, time and gap of the sweep."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    cases = result["cases"]
    _packed(axes[0, 0], [case for case in cases if case["packing"] and case["compared"]])
    _padded(axes[0, 1], [case for case in cases if "heuristics" in case])
    sweep = [case for case in cases if not case["compared"]]
    _lines(axes[1, 0], sweep, "ms", "planning, ms on one core (median)")
    for goal in result["goal_ms"]:
        place = goal["samples"], goal["ms"]
        axes[1, 0].plot(*place, marker="v", color="#222222", markersize=8, linestyle="")
        text = f"most allowed, W={goal['world_size']}"
        axes[1, 0].annotate(text, place, (-9, 3), textcoords="offset points", fontsize=8, ha="right")
    _lines(axes[1, 1], sweep, "gap", "gap to the plan's own bound (mean)")
    figure.suptitle(f"balanced on the reference cost model ({result['machine']}, {result['date']})")
    figure.savefig(path, dpi=110)


def _places(cases: Cases) -> list[str]:
    return [f"{case['world_size']}\n{case['samples']}" for case in cases]


def _packed(axes: Axes, cases: Cases) -> None:
    """Mean and worst gap of each size; one marker for each kind of data."""
    kinds = sorted({(case["median"], case["sigma"]) for case in cases}, reverse=True)
    for k, (median, sigma) in enumerate(kinds):
        chosen = [case for case in cases if (case["median"], case["sigma"]) == (median, sigma)]
        places = [i + 0.18 * (k - (len(kinds) - 1) / 2) for i in range(len(chosen))]
        mean = [100 * case["gap"] for case in chosen]
        more = [100 * (case["gap_worst"] - case["gap"]) for case in chosen]
        axes.errorbar(
            places, mean, yerr=[[0.0] * len(more), more], fmt="o", color=RANKS[k], capsize=3,
            label=f"median {median}, sigma {sigma}",
        )  # fmt: skip
        axes.set_xticks(range(len(chosen)), _places(chosen))
    axes.set(
        title="packing: makespan / LB* - 1 (mean, line to the worst)", ylabel="percent", xlabel="ranks, samples"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _padded(axes: Axes, cases: Cases) -> None:
    """Mean gap to the padding-aware bound, of the plan and of each heuristic; one place for each kind of step."""
    series = {"balanced": [case["bound_gap"] for case in cases]}
    for name in cases[0]["heuristics"] if cases else ():
        series[name] = [case["heuristics"][name] for case in cases]
    for name, gaps in series.items():
        axes.plot([max(100 * gap, 0.01) for gap in gaps], "o", color=COLOURS[name], label=name)
    labels = [f"{case['world_size']}/{case['samples']}, {case['median']}, {case['sigma']}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, rotation=90, fontsize=6)
    axes.set_yscale("log")
    axes.set(title="no packing: gap to the padding-aware bound (mean)", ylabel="percent")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _lines(axes: Axes, cases: Cases, value: str, title: str) -> None:
    """One line for each number of ranks, solid with packing; the mean over the kinds of data."""
    gaps = value == "gap"
    for k, world_size in enumerate(sorted({case["world_size"] for case in cases})):
        for packing, style in ((True, "-"), (False, "--")):
            chosen = [case for case in cases if (case["world_size"], case["packing"]) == (world_size, packing)]
            counts = sorted({case["samples"] for case in chosen})
            values = [[case[value] for case in chosen if case["samples"] == count] for count in counts]
            # Plans at the bound itself stand at the lower edge of the logarithmic scale.
            means = [max((100 if gaps else 1) * sum(column) / len(column), 0.01) for column in values]
            label = f"W={world_size}" if packing else None
            axes.plot(counts, means, style, marker=".", color=RANKS[k % len(RANKS)], label=label)
    axes.plot([], [], "-", color="#222222", label="packed")
    axes.plot([], [], "--", color="#222222", label="padded")
    axes.set(title=title, xlabel="samples", xscale="log", yscale="log", ylabel="percent" if gaps else "ms")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
