"""The picture of one step. Imported by ``report`` alone, and only for a picture: it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.report import Spans, describe, measured_idle

# Okabe and Ito's colours keep apart for every kind of colour vision; light ones first, since text stands on them.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2")
_HATCHES = ("", "//", "xx", "..", "oo", "++", "**")
IDLE = "#e4e4e4"
INK = "#222222"
_WIDTH_IN = 11.0
_CHARACTER_IN = 0.072
"""Width of a character of a label, in inches: a label is drawn only where it fits."""


def draw(plan: IterationPlan, planned: Spans, measured: Spans | None, path: Path) -> None:
    """Draw and write the PNG; arguments as in :func:`lightning_dcp.report.plot_timeline`."""
    shown = [(planned, _planned_title(plan))]
    if measured is not None:
        shown.append((measured, _measured_title(measured)))
    height = 1.6 + len(shown) * (0.55 + min(0.5, 8.0 / plan.world_size) * plan.world_size)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=130, layout="constrained")
    axes = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0])
    length = max((end for spans, _ in shown for rank in spans for _, end in rank), default=1e-3)
    style = _style(plan)
    scale, unit = (1e3, "ms") if length < 1.0 else (1.0, "s")
    for one, (spans, title) in zip(axes, shown, strict=True):
        scaled = [[(s * scale, e * scale) for s, e in rank] for rank in spans]
        _draw_ranks(one, (plan, style), scaled, length * scale)
        one.set_title(title, loc="left", fontsize=10, color=INK)
    if plan.lower_bound:
        axes[0].axvline(plan.lower_bound / 1e9 * scale, color="black", linestyle="--", linewidth=1.4)
    axes[-1].set_xlabel(f"time in the step [{unit}]")
    handles = _legend(plan, style)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(10, len(handles)),
        fontsize=8,
        handleheight=1.6,
        frameon=False,
    )
    figure.savefig(path, format="png")


def _planned_title(plan: IterationPlan) -> str:
    text = (
        f"planned: {_seconds(plan.makespan / 1e9)}, idle {plan.idle_ratio:.1%}, padding {plan.padding_ratio:.1%}"
    )
    return f"{text}, {plan.gap:.1%} above the lower bound" if plan.lower_bound else text


def _measured_title(measured: Spans) -> str:
    length = max((end for spans in measured for _, end in spans), default=0.0)
    return f"measured: {_seconds(length)}, idle {measured_idle(measured):.1%}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"


def _draw_ranks(axes: Any, drawn: tuple[IterationPlan, _Style], spans: Spans, length: float) -> None:
    plan, style = drawn
    end = max((e for rank in spans for _, e in rank), default=length)
    for rank in range(plan.world_size):
        axes.add_patch(Rectangle((0.0, rank - 0.45), end, 0.9, facecolor=IDLE, edgecolor="none"))
        for micro_batch, span in zip(plan.of_rank(rank), spans[rank], strict=True):
            _draw_bar(axes, style, micro_batch, (rank, span, length))
    axes.set(xlim=(0.0, length * 1.01), ylim=(plan.world_size - 0.4, -0.6), ylabel="rank")
    axes.set_yticks(range(plan.world_size))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bar(
    axes: Any, style: _Style, micro_batch: MicroBatch, place: tuple[int, tuple[float, float], float]
) -> None:
    rank, (start, end), length = place
    axes.add_patch(
        Rectangle(
            (start, rank - 0.45),
            end - start,
            0.9,
            facecolor=style.colours[micro_batch.sp_size],
            hatch=style.hatches[micro_batch.recompute],
            edgecolor="white",
            linewidth=0.8,
        )
    )
    text = describe(micro_batch)
    room = (end - start) / length * (_WIDTH_IN - 1.0)
    fits_flat, fits_upright = room > (len(text) + 1) * _CHARACTER_IN, room > 2.2 * _CHARACTER_IN
    if fits_flat or fits_upright:
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.75, "edgecolor": "none"}
        axes.text(
            (start + end) / 2,
            rank,
            text,
            rotation=0 if fits_flat else 90,
            ha="center",
            va="center",
            fontsize=7,
            color=INK,
            bbox=box if any(micro_batch.recompute) else None,
        )


class _Style(NamedTuple):
    """How the bars of a plan look: a colour for each p, a hatch for each r, both in rising order."""

    colours: dict[int, str]
    hatches: dict[tuple[int, ...], str]


def _style(plan: IterationPlan) -> _Style:
    sp_sizes = sorted({m.sp_size for m in plan.micro_batches})
    depths = sorted({m.recompute for m in plan.micro_batches}, key=lambda r: (sum(r), r))
    hatches = cycle(_HATCHES[1:])
    return _Style(
        colours=dict(zip(sp_sizes, cycle(COLOURS), strict=False)),
        hatches={depth: next(hatches) if any(depth) else _HATCHES[0] for depth in depths},
    )


def _legend(plan: IterationPlan, style: _Style) -> Sequence[Any]:
    handles: list[Any] = [Patch(facecolor=colour, label=f"p = {p}") for p, colour in style.colours.items()]
    for depth, hatch in style.hatches.items():
        label = f"r = {'+'.join(str(r) for r in depth) or '0'}"
        handles.append(Patch(facecolor="#999999", edgecolor="white", hatch=hatch, label=label))
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if plan.lower_bound:
        handles.append(Line2D([], [], color="black", linestyle="--", label="lower bound"))
    handles.append(Patch(facecolor="none", label="in a bar: batch size b, or b·r"))
    return handles
