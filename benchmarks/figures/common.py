"""What all figures share: the command line, the JSON file, the look of the pictures, the virtual cluster."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_dcp import virtual
from lightning_dcp.cost import IntArray
from lightning_dcp.lengths import distribution
from lightning_dcp.planners import Planner
from lightning_dcp.planners.grouped import Bucket, DCPInter, DCPIntra, PackedBaseline
from lightning_dcp.simulate import Cluster

RESULTS = Path(__file__).parent.parent / "results"
QUICK_RESULTS = Path("runs") / "figures"
"""Where ``--quick`` writes: what it computes must not replace the results that are shown."""

MODELS = {"h200-transformer-1d": "Transformer-1D", "h200-transformer-2d": "Transformer-2D"}
"""Profile and name of the paper's models (Table 1)."""

INK = "#222222"
COLOURS = {
    "static": "#999999",
    "bucket": "#D55E00",
    "packed": "#F0E442",
    "dcp-inter": "#E69F00",
    "dcp-intra": "#56B4E9",
    "balanced": "#009E73",
    "floating": "#0072B2",
}
"""Okabe and Ito's colours, which keep apart for every kind of colour vision."""

Result = dict[str, Any]
"""Values that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureOf:
    """One figure.

    Attributes:
        name: of its files, such as ``figure_8``.
        measure: computes it; gets whether to be quick and whether to show progress, gives ``settings`` and ``results``.
        draw: makes the picture.
        table: makes the Markdown of the documentation.
    """

    name: str
    measure: Callable[[bool, bool], Result]
    draw: Callable[[Result], Figure]
    table: Callable[[Result], str]


def main(figures: Iterable[FigureOf], arguments: Sequence[str] | None = None) -> list[Path]:
    """The command line of every figure; gives the JSON files that were written."""
    parser = argparse.ArgumentParser(description="Figures of the paper on the virtual H200 cluster.")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, less of everything")
    parser.add_argument(
        "--output", type=Path, help=f"folder of the results (default: {RESULTS.name}, quick: runs)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    folder = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        result = {**_facts(figure.name, options.quick), **figure.measure(options.quick, not options.no_progress)}
        path = folder / f"{figure.name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        figure.draw(result).savefig(path.with_suffix(".png"), metadata={"Software": None})
        print(f"{figure.name}: {path}\n\n{figure.table(result)}\n", flush=True)
        written.append(path)
    return written


def load(name: str, folder: Path = RESULTS) -> Result:
    """A result that was written before."""
    return dict(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def _facts(name: str, quick: bool) -> Result:
    """When and where; only planning times depend on it."""
    return {
        "figure": name,
        "quick": quick,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "processor": _processor(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": platform.system(),
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def drawing_planners(window: int, certify: bool = False) -> dict[str, Planner]:
    """The paper's planners and its baselines, each with the same choice of samples."""
    kinds = (Bucket, PackedBaseline, DCPInter, DCPIntra)
    return {planner.name: planner for planner in (kind(window=window, certify=certify) for kind in kinds)}


@cache
def cluster_of(model: str, world_size: int) -> Cluster:
    """A model of :data:`MODELS` on the virtual H200 cluster."""
    return Cluster.build(
        virtual.profile(model, world_size),
        world_size,
        memory_bytes=int(virtual.MEMORY_BYTES),
        sp_sizes=virtual.sp_sizes(model, world_size),
        ranks_per_node=virtual.RANKS_PER_NODE,
    )


def samples_of(model: str, data_set: str, count: int, seed: int) -> IntArray:
    """Shapes of a data set's samples for a model, ``[count, axes]``."""
    return virtual.shapes(model, distribution(data_set, count, seed))


def bar(cases: Iterable[Any], name: str, progress: bool) -> Any:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(cases, desc=name, leave=False, disable=None if progress else True)


def new_figure(width: float, height: float, **subplots: Any) -> tuple[Figure, Any]:
    """An empty picture and its axes."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots(**subplots)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8, colors=INK)
        each.yaxis.grid(True, color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def tokens_label(tokens: int) -> str:
    """``4096`` as ``4k``."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
