"""The picture of where the time went. Imported by ``report`` alone, and only for a picture: it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lightning_dcp._timeline import COLOURS, INK

_USEFUL, _LOST = COLOURS[2], COLOURS[1]


def draw(parts: Sequence[tuple[str, float]], path: Path) -> None:
    """Draw and write the PNG.

    Args:
        parts: label and share of each part; the first is what is left when all others are taken from the whole.
        path: where to write.
    """
    figure = Figure(figsize=(11.0, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    (useful, share), lost = parts[0], parts[1:]
    level = 1.0
    for place, (label, part) in enumerate(lost):
        level -= part
        _bar(axes, place, (level, part), (label, _LOST))
        axes.plot([place - 0.4, place + 1.4], [level * 100] * 2, color=INK, linewidth=0.7)
    _bar(axes, len(lost), (0.0, share), (useful, _USEFUL))
    axes.set_xticks(range(len(parts)), [label.replace(" ", "\n", 1) for label, _ in (*lost, parts[0])], fontsize=9)
    axes.set_ylabel("share of W times wall-clock [%]")
    axes.set_ylim(0.0, 108.0)
    axes.set_title(f"where the time of all ranks went: {share:.1%} useful", loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _bar(axes: object, place: int, extent: tuple[float, float], style: tuple[str, str]) -> None:
    bottom, height = (100 * value for value in extent)
    axes.bar(place, height, bottom=bottom, color=style[1], width=0.8, label=style[0])  # type: ignore[attr-defined]
    axes.text(place, bottom + height + 1, f"{height:.1f}", ha="center", fontsize=9, color=INK)  # type: ignore[attr-defined]
