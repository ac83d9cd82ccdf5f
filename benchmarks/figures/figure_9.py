"""Figure 9: weak scaling from 8 to 1,024 GPUs: the samples of a step grow with the GPUs, all else stays.

All planners on the data set ``long``, and ``balanced`` on the other two as well. Steps in the middle of an epoch (see
``steady.py``). The rate is the share of all GPU time that goes into the samples' own work; twice the GPUs with the same
share train twice the samples in the same time. The planners that draw choose how many samples a step has, so for them
it is their own rule that scales.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from matplotlib.figure import Figure

from benchmarks.figures.common import (
    COLOURS,
    INK,
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
from benchmarks.figures.steady import steady
from lightning_dcp.cost import IntArray
from lightning_dcp.planners import Balanced

SEED, WINDOW_PER_GPU = 0, 128
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES_PER_GPU = {
    "h200-transformer-1d": {"short": 16, "balanced": 16, "long": 4},
    "h200-transformer-2d": {"short": 16, "balanced": 16, "long": 8},
}
"""Samples of a step of ``balanced``, enough that the longest sample does not take longer than all others together."""

CASES = (
    *((name, "long") for name in ("bucket", "dcp-inter", "dcp-intra", "balanced")),
    ("balanced", "balanced"),
    ("balanced", "short"),
)
"""Planners and data sets."""

SAMPLES, FEWEST_STEPS = 16_384, 4
"""Samples of all counted steps of ``balanced``, and its fewest steps."""

GPU_STEPS, FEWEST_DRAWN = 2048, 16
"""Counted steps of a planner that draws, times GPUs, and its fewest; as far as a window of samples goes."""


def measure(quick: bool, progress: bool) -> Result:
    """A few steps of each planner on each number of GPUs."""
    world_sizes = (8, 32) if quick else WORLD_SIZES
    cases = [(model, world_size, *case) for model, world_size in product(MODELS, world_sizes) for case in CASES]
    rows = [
        {
            "model": model,
            "world_size": world_size,
            "planner": name,
            "data_set": data_set,
            **_case(model, world_size, name, data_set, quick),
        }
        for model, world_size, name, data_set in bar(cases, "figure_9", progress)
    ]
    settings = {
        "seed": SEED,
        "samples_per_gpu": SAMPLES_PER_GPU,
        "world_sizes": world_sizes,
        "samples": SAMPLES,
        "fewest_steps": FEWEST_STEPS,
        "window_per_gpu": WINDOW_PER_GPU,
        "gpu_steps": GPU_STEPS,
        "fewest_drawn": FEWEST_DRAWN,
    }
    return {"settings": settings, "results": rows}


def _case(model: str, world_size: int, name: str, data_set: str, quick: bool) -> Result:
    batch = SAMPLES_PER_GPU[model][data_set] * world_size
    window = (8 if quick else WINDOW_PER_GPU) * world_size
    planner = {**drawing_planners(window), "balanced": Balanced()}[name]
    fixed, drawn = max(SAMPLES // batch, FEWEST_STEPS), max(GPU_STEPS // world_size, FEWEST_DRAWN)
    found = steady(
        partial(_shapes, model, data_set),
        cluster_of(model, world_size),
        planner,
        steps=3 if quick else drawn if planner.draws else fixed,
        batch=batch,
        seed=SEED,
    )
    return found.as_json()


def _shapes(model: str, data_set: str, count: int) -> IntArray:
    return samples_of(model, data_set, count, SEED)


def rows_of(result: Result, model: str, planner: str, data_set: str) -> list[Result]:
    """Rows of one line of the figure, by number of GPUs."""
    wanted = (model, planner, data_set)
    return [row for row in result["results"] if (row["model"], row["planner"], row["data_set"]) == wanted]


def of_linear(rows: list[Result]) -> list[float]:
    """Share of linear scaling, for each number of GPUs: the useful ratio over that of the fewest."""
    return [float(row["useful_ratio"]) / float(rows[0]["useful_ratio"]) for row in rows]


def draw(result: Result) -> Figure:
    """Useful GPUs over the number of GPUs, both axes logarithmic, and the line of perfect scaling of ``balanced``."""
    figure, axes = new_figure(10.0, 3.8, ncols=len(MODELS))
    sizes = result["settings"]["world_sizes"]
    for axis, (model, title) in zip(axes, MODELS.items(), strict=True):
        for name, data_set in CASES:
            if data_set != "long":
                continue
            rates = [row["useful_ratio"] * row["world_size"] for row in rows_of(result, model, name, data_set)]
            axis.plot(sizes, rates, color=COLOURS[name], marker="o", markersize=3.5, label=name)
            if name == "balanced":
                linear = [rates[0] * size / sizes[0] for size in sizes]
                axis.plot(sizes, linear, color=INK, linestyle=":", label="linear")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.set_title(f"{title}, long", fontsize=10, loc="left")
        axis.set(xlabel="GPUs", ylabel="useful GPUs")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def table(result: Result) -> str:
    """Share of linear scaling, and idle ratio in brackets."""
    sizes = result["settings"]["world_sizes"]
    lines = []
    for model, title in MODELS.items():
        lines.append([f"**{title}**", *[""] * len(sizes)])
        for name, data_set in CASES:
            rows = rows_of(result, model, name, data_set)
            shares = zip(of_linear(rows), rows, strict=True)
            values = [f"{100 * s:.0f} % ({100 * row['idle_ratio']:.1f} %)" for s, row in shares]
            lines.append([f"`{name}`, {data_set}", *values])
    return markdown(["GPUs", *(f"{size:,}" for size in sizes)], lines)


FIGURE = FigureOf(name="figure_9", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
