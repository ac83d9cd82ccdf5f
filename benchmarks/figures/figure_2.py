"""Figure 2: how well bucket parallel balances, Transformer-1D.

One sequence-parallel size for all lengths, and batch sizes lowered until the batches of all lengths last about equally
long: what the planner ``bucket`` chooses for the data set. Beside it the most tokens per second that these lengths
reach with sizes of their own (``dcp-inter``), all layers recomputed in both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from benchmarks.figures.common import (
    COLOURS,
    INK,
    FigureOf,
    Result,
    cluster_of,
    main,
    markdown,
    new_figure,
    samples_of,
    tokens_label,
)
from lightning_dcp.planners import PlanRequest
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.menu import ranked
from lightning_dcp.planners.grouped.tuning import best_buckets

MODEL, DATA_SET, WORLD_SIZE = "h200-transformer-1d", "balanced", 32
SAMPLES, SEED = 65_536, 0
EDGES = tuple(1024 << k for k in range(9))


def measure(quick: bool, progress: bool) -> Result:  # noqa: ARG001 - a second either way
    """Batch size, time and speed of each length group."""
    cluster = cluster_of(MODEL, WORLD_SIZE)
    request = PlanRequest(
        sample_ids=range(SAMPLES),
        shapes=samples_of(MODEL, DATA_SET, SAMPLES, SEED),
        cost=cluster.cost,
        world=cluster.world,
        limits=replace(cluster.limits, recompute="full"),
    )
    groups = Groups.build(request, cluster.world.sp_sizes, EDGES, len(EDGES))
    longest = int(request.shapes.max())
    fitting = [p for p in cluster.world.sp_sizes if _fits(request, p, longest)]
    buckets = best_buckets(request, groups, fitting, last=False)
    best = [settings[0] for settings in ranked(request, cluster.world.sp_sizes, groups.sizes, groups.counts)]
    rows = []
    for k, tokens in enumerate(groups.sizes[:, 0].tolist()):
        b, seconds = int(buckets.batch_sizes[k]), int(buckets.nanoseconds[k]) / 1e9
        free = best[k]
        rows.append(
            {
                "tokens": tokens,
                "samples": int(groups.counts[k]),
                "batch_size": b,
                "seconds": seconds,
                "tokens_per_second_and_gpu": b * tokens / seconds / buckets.sp_size,
                "own_sp_size": free.sp_size,
                "own_batch_size": free.batch_size,
                "own_tokens_per_second_and_gpu": free.batch_size * tokens / free.nanoseconds * 1e9 / free.sp_size,
            }
        )
    settings = {
        "profile": MODEL,
        "data_set": DATA_SET,
        "world_size": WORLD_SIZE,
        "samples": SAMPLES,
        "seed": SEED,
        "edges": EDGES,
        "sp_size": buckets.sp_size,
    }
    return {"settings": settings, "results": rows}


def _fits(request: PlanRequest, sp_size: int, tokens: int) -> bool:
    limits = request.limits
    found = request.cost.settings(
        sp_size, np.asarray(1), np.asarray(tokens), limits.memory_bytes, limits.recompute
    )
    return int(found.bytes) <= limits.memory_bytes


def draw(result: Result) -> Figure:
    """Bars of time, a dashed line of batch sizes."""
    figure, axes = new_figure(6.4, 3.4)
    rows = result["results"]
    places = range(len(rows))
    axes.bar(places, [row["seconds"] for row in rows], color=COLOURS["bucket"], width=0.65)
    axes.set_xticks(places, [_name(row) for row in rows])
    axes.set(xlabel="tokens of a sample, up to", ylabel="time of a batch [s]")
    right = axes.twinx()
    right.plot(places, [row["batch_size"] for row in rows], linestyle="--", marker="o", markersize=3, color=INK)
    right.set_yscale("log")
    right.set_ylabel("batch size", color=INK)
    right.spines[["top"]].set_visible(False)
    right.tick_params(labelsize=8, colors=INK)
    return figure


def table(result: Result) -> str:
    """One row for each length group."""
    head = [
        "tokens up to",
        "samples",
        "batch size",
        "time",
        "tokens/s and GPU",
        "with own b, p",
        "tokens/s and GPU",
    ]
    rows = [
        [
            _name(row),
            f"{row['samples']:,}",
            str(row["batch_size"]),
            f"{row['seconds']:.2f} s",
            f"{row['tokens_per_second_and_gpu']:,.0f}",
            f"{row['own_batch_size']}, {row['own_sp_size']}",
            f"{row['own_tokens_per_second_and_gpu']:,.0f}",
        ]
        for row in result["results"]
    ]
    return markdown(head, rows)


def _name(row: Result) -> str:
    return tokens_label(next(edge for edge in EDGES if edge >= row["tokens"]))


FIGURE = FigureOf(name="figure_2", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
