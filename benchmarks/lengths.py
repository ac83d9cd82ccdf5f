"""What the built-in length distributions are made of: by number of samples, by tokens, by compute.

``python -m benchmarks.lengths`` writes the picture of ``docs/lengths.md`` and the numbers of its table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths import DISTRIBUTIONS, distribution, training_flops

ROOT = Path(__file__).parent.parent
SAMPLES = 1_000_000
"""Drawn with seed 0."""

_SHORT, _LONG = 8192, 65_536
_MEASURES = ("samples", "tokens", "compute")
_COLOURS = ("#999999", "#56B4E9", "#0072B2")
_INK = "#222222"
_EDGES = 512 * 2.0 ** np.arange(0, 9.75, 0.5)


def weights(lengths: IntArray) -> dict[str, Any]:
    """What each sample counts, by measure."""
    return dict(zip(_MEASURES, (np.ones(len(lengths)), lengths, training_flops(lengths)), strict=True))


def facts(lengths: IntArray) -> dict[str, Any]:
    """Quantiles in tokens, and the shares of short and of long samples in percent."""
    found: dict[str, Any] = {
        "mean": round(float(lengths.mean())),
        **{f"q{q}": int(np.quantile(lengths, q / 100, method="higher")) for q in (1, 50, 90, 99)},
        "longest": int(lengths.max()),
    }
    for measure, weight in weights(lengths).items():
        found[f"{measure} below {_SHORT}"] = _percent(weight, lengths < _SHORT)
        found[f"{measure} from {_LONG}"] = _percent(weight, lengths >= _LONG)
    return found


def draw(drawn: dict[str, IntArray]) -> Figure:
    """Histograms over the logarithm of the length, a column for each distribution, a row for each measure."""
    figure = Figure(figsize=(11.0, 6.2), dpi=130, layout="constrained")
    grid = figure.subplots(len(_MEASURES), len(drawn), sharex=True, sharey="row")
    for column, (name, lengths) in enumerate(drawn.items()):
        grid[0, column].set_title(name, color=_INK, fontweight="bold")
        for row, (measure, weight) in enumerate(weights(lengths).items()):
            axes = grid[row, column]
            axes.hist(lengths, bins=_EDGES, weights=100 * weight / weight.sum(), color=_COLOURS[row], rwidth=0.9)
            _style(axes)
            if column == 0:
                axes.set_ylabel(f"% of {measure}", color=_INK)
    for axes in grid[-1]:
        axes.set_xlabel("tokens of a sample", color=_INK)
    return figure


def _style(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**k for k in (9, 11, 13, 15, 17)], ["512", "2k", "8k", "32k", "128k"])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)


def _percent(weight: Any, chosen: Any) -> float:
    return round(100 * float(weight[chosen].sum() / weight.sum()), 2)


def table(found: dict[str, Any]) -> str:
    """Markdown rows, one for each distribution."""
    rows = []
    for name, row in found.items():
        below, above = ([row[f"{m} {end}"] for m in _MEASURES] for end in (f"below {_SHORT}", f"from {_LONG}"))
        sizes = " | ".join(f"{row[key]:,}" for key in ("mean", "q50", "q90", "q99", "longest"))
        shares = " | ".join(" / ".join(f"{value:.2g}" for value in part) for part in (below, above))
        rows.append(f"| `{name}` | {sizes} | {shares} |")
    return "\n".join(rows)


def main() -> None:
    """Write the picture and the numbers."""
    parser = argparse.ArgumentParser(description="Picture and numbers of the built-in length distributions.")
    parser.add_argument(
        "--output", type=Path, default=ROOT, help="folder with docs/ and benchmarks/results/ in it"
    )
    root = parser.parse_args().output
    drawn = {name: distribution(name, SAMPLES) for name in DISTRIBUTIONS}
    found = {name: facts(lengths) for name, lengths in drawn.items()}
    for folder in (root / "docs", root / "benchmarks" / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    content = {"samples": SAMPLES, "seed": 0, "distributions": found}
    (root / "benchmarks" / "results" / "lengths.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(drawn).savefig(root / "docs" / "lengths.png", metadata={"Software": None})
    print(table(found))


if __name__ == "__main__":
    main()
