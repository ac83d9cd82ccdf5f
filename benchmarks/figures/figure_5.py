"""Figure 5: what sequence parallelism costs by length, Transformer-1D.

Weak scaling: ``p`` samples on ``p`` ranks, against one sample on one rank. Each rank computes the same tokens, so what
is more is communication. All layers are recomputed and the memory is not looked at, so that every length has every
size.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures.common import FigureOf, Result, cluster_of, main, markdown, new_figure, tokens_label

MODEL, WORLD_SIZE = "h200-transformer-1d", 32
LENGTHS = tuple(1024 << k for k in range(9))


def measure(quick: bool, progress: bool) -> Result:  # noqa: ARG001 - milliseconds either way
    """Overhead of each size and length, as a share of the time on one rank."""
    cluster = cluster_of(MODEL, WORLD_SIZE)
    cost, sizes = cluster.cost, cluster.world.sp_sizes
    alone = {s: cost.nanoseconds(1, (s,), 1, cost.num_layers) for s in LENGTHS}
    overhead = {
        str(p): [cost.nanoseconds(p, (s,), p, cost.num_layers) / alone[s] - 1 for s in LENGTHS]
        for p in sizes
        if p > 1
    }
    settings = {"profile": MODEL, "world_size": WORLD_SIZE, "lengths": LENGTHS, "recompute": "all layers"}
    return {"settings": settings, "results": {"overhead": overhead}}


def draw(result: Result) -> Figure:
    """Lines over the length, one for each size."""
    figure, axes = new_figure(6.4, 3.6)
    lengths, overhead = result["settings"]["lengths"], result["results"]["overhead"]
    for (p, values), colour in zip(overhead.items(), _shades(len(overhead)), strict=True):
        axes.plot(lengths, [100 * v for v in values], marker="o", markersize=3.5, color=colour, label=f"p = {p}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens_label(s) for s in lengths])
    axes.set(xlabel="tokens of a sample", ylabel="more time than on one rank [%]", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)
    return figure


def _shades(count: int) -> list[Any]:
    """From light to dark, as the size grows."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.15 + 0.85 * k / max(count - 1, 1)) for k in range(count)]


def table(result: Result) -> str:
    """Sizes by lengths."""
    lengths, overhead = result["settings"]["lengths"], result["results"]["overhead"]
    head = ["p", *(tokens_label(s) for s in lengths)]
    return markdown(head, [[p, *(f"{100 * v:.1f} %" for v in values)] for p, values in overhead.items()])


FIGURE = FigureOf(name="figure_5", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
