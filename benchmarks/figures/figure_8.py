"""Figure 8: throughput and idle time on 32 GPUs, three data sets and two models, all planners on the same samples.

A planner of fixed steps needs a number of samples for a step. It gets about as many as ``dcp-intra`` draws into its
steps on average, and the floating steps between half and twice as many, so all make about as many optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from benchmarks.figures.common import (
    COLOURS,
    MODELS,
    FigureOf,
    Result,
    bar,
    cluster_of,
    drawing_planners,
    main,
    markdown,
    new_figure,
    samples_of,
)
from lightning_dcp.cost import IntArray
from lightning_dcp.planners import Balanced, Floating, Planner, Static
from lightning_dcp.simulate import Cluster, for_dataset, simulate, tuned_static, with_ratios

WORLD_SIZE, WINDOW, SEED = 32, 32_768, 0
SAMPLES = {"short": 65_536, "balanced": 65_536, "long": 16_384}
"""Samples of each data set (Appendix A); a sample of ``long`` takes fifty times the time."""
QUICK_SAMPLES = {"short": 4096, "long": 1024}
FLOATING_CANDIDATES = 4
PAPER = {
    "h200-transformer-1d": {"dcp-inter": 2.70, "dcp-intra": 2.88},
    "h200-transformer-2d": {"dcp-inter": 1.68},
}
"""The paper's largest ratios to bucket; 2.88 is the largest of both models, on which of them is not said."""

NAMES = ("static", "bucket", "packed", "dcp-inter", "dcp-intra", "balanced", "floating")


def average_step(shapes: IntArray, cluster: Cluster, planner: Planner) -> int:
    """Samples that a drawing planner draws into a step of this data, on average."""
    found = simulate(
        shapes, cluster, for_dataset(planner, shapes), steps=1, global_batch_size=len(shapes), seed=SEED
    )
    return max(round(found.samples / found.optimizer_steps), 2)


def planners_of(count: int, static: Static, axes: int) -> dict[str, Planner]:
    """All planners for steps of about ``count`` samples; packing needs samples of one axis."""
    drawing = drawing_planners(WINDOW, certify=True)
    if axes > 1:
        del drawing["packed"]
    return {
        "static": static,
        **drawing,
        "balanced": Balanced(),
        "floating": Floating(
            min_samples=max(count // 2, 1), max_samples=2 * count, candidates=FLOATING_CANDIDATES
        ),
    }


def cell(model: str, data_set: str, samples: int, progress: bool) -> Result:
    """One model and data set: every planner over the same samples."""
    cluster = cluster_of(model, WORLD_SIZE)
    packing = replace(cluster, limits=replace(cluster.limits, packing=True))
    shapes = samples_of(model, data_set, samples, SEED)
    count = average_step(shapes, cluster, drawing_planners(WINDOW)["dcp-intra"])
    static = tuned_static(shapes, cluster, global_batch_size=count, seed=SEED)
    planners = planners_of(count, static, shapes.shape[1])
    found = [
        simulate(
            shapes,
            packing if name == "packed" else cluster,
            for_dataset(planner, shapes),
            steps=samples // count,
            global_batch_size=count,
            seed=SEED,
        )
        for name, planner in bar(planners.items(), f"{model}, {data_set}", progress)
    ]
    results = {name: asdict(each) for name, each in zip(planners, with_ratios(found, list(planners)), strict=True)}
    better = max(("balanced", "floating"), key=lambda name: float(results[name]["tokens_per_second"]))
    return {
        "model": model,
        "data_set": data_set,
        "samples": samples // count * count,
        "global_batch_size": count,
        "better_balanced": better,
        "static": {"sp_size": static.sp_size, "batch_size": static.batch_size},
        "planners": results,
    }


def measure(quick: bool, progress: bool) -> Result:
    """All six cells."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    cells = list(zip(MODELS, samples, strict=True)) if quick else list(product(MODELS, samples))
    results = [cell(model, data_set, samples[data_set], progress) for model, data_set in cells]
    settings = {
        "world_size": WORLD_SIZE,
        "seed": SEED,
        "samples": samples,
        "window": WINDOW,
        "floating_candidates": FLOATING_CANDIDATES,
        "paper_ratio_to_bucket": PAPER,
    }
    return {"settings": settings, "results": results}


def draw(result: Result) -> Figure:
    """Ratio to bucket and idle ratio, a row for each model."""
    figure, axes = new_figure(10.5, 5.6, nrows=2, ncols=2)
    for row, (model, title) in enumerate(MODELS.items()):
        cells = [each for each in result["results"] if each["model"] == model]
        _bars(axes[row, 0], cells, "ratio_to_bucket", 1.0)
        _bars(axes[row, 1], cells, "idle_ratio", 100.0)
        axes[row, 0].set_ylabel(f"{title}\ntokens per second over bucket", fontsize=9)
        axes[row, 1].set_ylabel("idle ratio [%]", fontsize=9)
    handles = [axes[0, 0].bar(0, 0, color=COLOURS[name]) for name in NAMES]
    figure.legend(handles, NAMES, loc="outside lower center", ncols=len(NAMES), fontsize=8, frameon=False)
    return figure


def _bars(axes: object, cells: list[Result], key: str, scale: float) -> None:
    width = 0.8 / len(NAMES)
    for index, name in enumerate(NAMES):
        places = [k + (index - len(NAMES) / 2 + 0.5) * width for k in range(len(cells))]
        values = [scale * each["planners"].get(name, {}).get(key, np.nan) for each in cells]
        axes.bar(places, values, width=0.9 * width, color=COLOURS[name])  # type: ignore[attr-defined]
    axes.set_xticks(range(len(cells)), [each["data_set"] for each in cells])  # type: ignore[attr-defined]


def shortfalls(result: Result) -> list[str]:
    """What the figure should show and does not, one sentence for each."""
    found, gains = [], []
    for each in result["results"]:
        planners, name = each["planners"], f"{MODELS[each['model']]}, {each['data_set']}"
        speed = {key: float(value["tokens_per_second"]) for key, value in planners.items()}
        better = each["better_balanced"]
        gains.append(speed[better] / speed["dcp-intra"])
        found += [
            f"{name}: `{key}` drops or repeats samples"
            for key, value in planners.items()
            if value["samples_dropped"] or value["samples_repeated"]
        ]
        for more, less in (("dcp-intra", "dcp-inter"), ("dcp-inter", "bucket"), (better, "dcp-intra")):
            ratio = speed[more] / speed[less]
            if ratio < (0.995 if more == better else 1.0):
                found.append(f"{name}: `{more}` reaches {100 * ratio:.1f} % of `{less}`")
        idle = float(planners[better]["idle_ratio"])
        if idle >= 0.02:
            found.append(f"{name}: `{better}` idles {100 * idle:.1f} %")
    if np.mean(gains) <= 1.0:
        found.append(f"`balanced` is {np.mean(gains):.3f} times `dcp-intra` on average")
    return found


def table(result: Result) -> str:
    """Largest ratios beside the paper's, one row for each planner in each cell, and what does not hold."""
    head = ["", "tokens/s", "over bucket", "idle", "padding", "gap", "steps", "samples a step"]
    rows = markdown(head, (row for each in result["results"] for row in _rows(each)))
    missing = shortfalls(result)
    note = "\n".join(f"- {line}" for line in missing) if missing else "Nothing."
    return f"{_ratios(result)}\n\n{rows}\n\nWhat should hold and does not:\n\n{note}"


def _ratios(result: Result) -> str:
    """The largest ratio to bucket over the data sets, for each model."""
    rows = []
    for name in NAMES:
        row = [f"`{name}`"]
        for model in MODELS:
            cells = [each["planners"] for each in result["results"] if each["model"] == model]
            ratios = [cell[name]["ratio_to_bucket"] for cell in cells if name in cell]
            paper = PAPER[model].get(name)
            row += [f"{max(ratios):.2f}" if ratios else "-", "-" if paper is None else f"{paper:.2f}"]
        rows.append(row)
    columns = [column for title in MODELS.values() for column in (title, "paper")]
    return markdown(["largest ratio to `bucket`", *columns], rows)


def _rows(each: Result) -> Iterator[list[str]]:
    yield [f"**{MODELS[each['model']]}, {each['data_set']}**, {each['samples']:,} samples", *[""] * 7]
    for name, found in each["planners"].items():
        gap = found["gap"]
        yield [
            f"`{name}`{' (better of the two)' if name == each['better_balanced'] else ''}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['ratio_to_bucket']:.2f}",
            f"{100 * found['idle_ratio']:.1f} %",
            f"{100 * found['padding_ratio']:.1f} %",
            "-" if gap is None else f"{100 * gap:.1f} %",
            str(found["optimizer_steps"]),
            f"{found['samples'] / found['optimizer_steps']:,.0f}",
        ]


FIGURE = FigureOf(name="figure_8", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
