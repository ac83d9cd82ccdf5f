"""Figure 4: idle time over 140 random data sets, bucket parallel and the others.

Each data set is lognormal with a random median and a random width, cut off at 512 and 262,144 tokens. The imbalance
ratio is the paper's (4.2): the share of the time in which a GPU waits for others, here in steps in the middle of an
epoch. Steps of ``balanced`` have as many samples as those of ``dcp-intra`` have on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from benchmarks.figures.common import (
    COLOURS,
    FigureOf,
    Result,
    bar,
    cluster_of,
    drawing_planners,
    main,
    markdown,
    new_figure,
)
from benchmarks.figures.steady import steady
from lightning_dcp.cost import IntArray
from lightning_dcp.planners import Balanced

MODEL, WORLD_SIZE = "h200-transformer-1d", 32
PLANNERS = ("bucket", "dcp-inter", "dcp-intra", "balanced")
DATA_SETS, STEPS, WINDOW, SEED = 140, 16, 4096, 0
MEDIANS, SIGMAS, RANGE = (1024, 32_768), (0.4, 1.8), (512, 262_144)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A random lognormal data set.

    Attributes:
        number: seeds it.
        median: in tokens, before the cut.
        sigma: of the logarithm, before the cut.
    """

    number: int
    median: float
    sigma: float

    @classmethod
    def of(cls, number: int) -> DataSet:
        """The data set of this number: median even on a logarithmic scale, sigma even."""
        random = np.random.default_rng([SEED, number])
        median = float(np.exp(random.uniform(*np.log(MEDIANS))))
        return cls(number=number, median=median, sigma=float(random.uniform(*SIGMAS)))

    def shapes(self, count: int) -> IntArray:
        """So many samples, ``[count, 1]``; the first are the same for every count."""
        random = np.random.default_rng([SEED, self.number, 1])
        drawn = random.lognormal(np.log(self.median), self.sigma, count)
        return np.clip(drawn.round(), *RANGE).astype(np.int64)[:, None]


def measure(quick: bool, progress: bool) -> Result:
    """Idle ratios of all planners on each data set."""
    number, steps = (2, 2) if quick else (DATA_SETS, STEPS)
    cluster, drawing = cluster_of(MODEL, WORLD_SIZE), drawing_planners(WINDOW)
    rows = []
    for k in bar(range(number), "figure_4", progress):
        data_set = DataSet.of(k)
        row: Result = {"median": round(data_set.median), "sigma": round(data_set.sigma, 3)}
        run = partial(steady, data_set.shapes, cluster, steps=steps, seed=SEED)
        for name in PLANNERS[:-1]:
            row[name] = run(drawing[name], batch=1).as_json()
        row["balanced"] = run(Balanced(), batch=round(row["dcp-intra"]["samples_per_step"])).as_json()
        rows.append(row)
    settings = {
        "profile": MODEL,
        "world_size": WORLD_SIZE,
        "data_sets": number,
        "steps": steps,
        "seed": SEED,
        "medians": MEDIANS,
        "sigmas": SIGMAS,
        "range": RANGE,
        "window": WINDOW,
    }
    return {"settings": settings, "results": rows}


def _idle(result: Result, name: str) -> list[float]:
    return sorted(100 * row[name]["idle_ratio"] for row in result["results"])


def draw(result: Result) -> Figure:
    """The data sets of each planner, sorted by idle ratio."""
    figure, axes = new_figure(6.4, 3.6)
    for name in PLANNERS:
        values = _idle(result, name)
        share = [100 * (k + 0.5) / len(values) for k in range(len(values))]
        axes.plot(share, values, color=COLOURS[name], label=name, linewidth=1.8)
    axes.set(
        xlabel="data sets, each planner's sorted by its idle ratio [%]",
        ylabel="idle ratio [%]",
        xlim=(0, 100),
        ylim=(0, None),
    )
    axes.legend(fontsize=8, frameon=False)
    return figure


def table(result: Result) -> str:
    """Quantiles of each planner."""
    rows = []
    for name in PLANNERS:
        values = _idle(result, name)
        points = [np.mean(values), *np.quantile(values, (0.1, 0.5, 0.9)), max(values)]
        rows.append([f"`{name}`", *(f"{v:.1f} %" for v in points)])
    return markdown(["idle ratio", "mean", "10th percentile", "median", "90th percentile", "worst"], rows)


FIGURE = FigureOf(name="figure_4", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
