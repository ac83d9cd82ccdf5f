"""Figure 10: dcp-intra over dcp-inter by length, Transformer-1D.

For samples of one length: the most tokens per second and GPU over all batch sizes and sequence-parallel sizes (Eq. 1)
with the fewest recomputed layers that fit (dcp-intra), over that with all layers recomputed (dcp-inter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from benchmarks.figures.common import (
    COLOURS,
    FigureOf,
    Result,
    cluster_of,
    main,
    markdown,
    new_figure,
    tokens_label,
)
from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.planners import PlanRequest
from lightning_dcp.planners.grouped.menu import Setting, ranked
from lightning_dcp.simulate import Cluster

MODEL, WORLD_SIZE = "h200-transformer-1d", 32
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 49152, 65536, 98304, 131072, 163840, 196608, 229376, 262144)
MAX_BATCH_SIZE = 1024
PAPER = (20, 25)
"""Percent that the paper gains for most lengths under 200k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best setting for samples of one length.

    Attributes:
        sp_size: ``p``.
        batch_size: ``b``.
        recompute: recomputed layers.
        tokens_per_second: of one GPU.
    """

    sp_size: int
    batch_size: int
    recompute: tuple[int, ...]
    tokens_per_second: float


def best_settings(cluster: Cluster, lengths: Sequence[int], policy: RecomputePolicy) -> list[Best]:
    """Most tokens per second and GPU for samples of each length, chosen as ``dcp-inter`` and ``dcp-intra`` do."""
    shapes = np.asarray(lengths)[:, None]
    limits = replace(cluster.limits, recompute=policy)
    request = PlanRequest(
        sample_ids=range(len(lengths)), shapes=shapes, cost=cluster.cost, world=cluster.world, limits=limits
    )
    supply = np.full(len(lengths), MAX_BATCH_SIZE)
    chosen = ranked(request, cluster.world.sp_sizes, shapes, supply)
    return [_best(request, tokens, settings[0]) for tokens, settings in zip(lengths, chosen, strict=True)]


def _best(request: PlanRequest, tokens: int, setting: Setting) -> Best:
    p, b, nanoseconds = setting
    memory, policy = request.limits.memory_bytes, request.limits.recompute
    found = request.cost.settings(p, np.asarray(b), np.asarray(tokens), memory, policy)
    return Best(
        sp_size=p,
        batch_size=b,
        recompute=tuple(found.recompute.tolist()),
        tokens_per_second=b * tokens / (p * nanoseconds / 1e9),
    )


def measure(quick: bool, progress: bool) -> Result:  # noqa: ARG001 - milliseconds either way
    """Both settings of every length."""
    cluster = cluster_of(MODEL, WORLD_SIZE)
    rows = []
    full, auto = best_settings(cluster, LENGTHS, "full"), best_settings(cluster, LENGTHS, "auto")
    for s, inter, intra in zip(LENGTHS, full, auto, strict=True):
        gain = intra.tokens_per_second / inter.tokens_per_second - 1
        rows.append({"tokens": s, "gain": gain, "dcp-inter": asdict(inter), "dcp-intra": asdict(intra)})
    settings = {
        "profile": MODEL,
        "world_size": WORLD_SIZE,
        "lengths": LENGTHS,
        "max_batch_size": MAX_BATCH_SIZE,
        "num_layers": cluster.cost.num_layers,
    }
    return {"settings": settings, "results": rows}


def draw(result: Result) -> Figure:
    """Bars over the length, the paper's range behind them."""
    figure, axes = new_figure(6.4, 3.2)
    rows = result["results"]
    axes.axhspan(*PAPER, color="#dddddd", label="paper, most lengths under 200k")
    axes.bar(range(len(rows)), [100 * row["gain"] for row in rows], color=COLOURS["dcp-intra"])
    axes.set_xticks(range(len(rows)), [tokens_label(row["tokens"]) for row in rows])
    axes.set(xlabel="tokens of a sample", ylabel="dcp-intra over dcp-inter [%]")
    axes.set_ylim(0, 30)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def table(result: Result) -> str:
    """One row for each length."""
    rows = [
        [
            tokens_label(row["tokens"]),
            f"{100 * row['gain']:.1f} %",
            *(_setting(row[name]) for name in ("dcp-inter", "dcp-intra")),
            "+".join(map(str, row["dcp-intra"]["recompute"])),
        ]
        for row in result["results"]
    ]
    return markdown(["tokens", "gain", "dcp-inter: b, p", "dcp-intra: b, p", "layers it recomputes"], rows)


def _setting(best: Result) -> str:
    return f"{best['batch_size']}, {best['sp_size']}"


FIGURE = FigureOf(name="figure_10", measure=measure, draw=draw, table=table)

if __name__ == "__main__":
    main([FIGURE])
