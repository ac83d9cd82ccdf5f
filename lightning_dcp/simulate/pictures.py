"""The pictures of ``lightning-dcp simulate --plot``. Imported only for a picture: it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

try:
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from lightning_dcp._timeline import COLOURS, IDLE, INK
except ImportError as error:
    raise ImportError(
        "pictures are drawn with matplotlib, which is not installed; "
        "install it with: pip install 'lightning-dcp[plots]'"
    ) from error

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.simulate.tally import Simulation

Scaling = Mapping[str, Sequence[tuple[int, float]]]
"""Ranks and tokens per second of each planner."""

_WIDTH_IN = 11.0
_BAR_IN, _TIMELINE_IN, _SCALING_IN = 0.34, 1.5, 3.2
_DASHES = ("-", "--", "-.", ":")


def draw(
    results: Sequence[Simulation], plans: Mapping[str, IterationPlan], scaling: Scaling, path: str | Path
) -> None:
    """Draw throughput, idle time and padding of all planners, one step of each, and weak scaling where it was run.

    Args:
        results: simulations of the same samples.
        plans: one step of each planner, by its label.
        scaling: ranks and tokens per second by planner, for as many worlds as were run; may be empty.
        path: where to write; the suffix says the format.
    """
    rows = [0.9 + _BAR_IN * len(results), *(_TIMELINE_IN for _ in plans), *([_SCALING_IN] if scaling else [])]
    figure = Figure(figsize=(_WIDTH_IN, sum(rows) + 0.6), dpi=130, layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
    left, right = parts[0].subplots(1, 2, sharey=True)
    _throughput(left, results)
    _losses(right, results)
    longest = max((plan.makespan for plan in plans.values()), default=1)
    sizes = sorted({m.sp_size for plan in plans.values() for m in plan.micro_batches})
    colours = dict(zip(sizes, cycle(COLOURS), strict=False))
    for part, (label, plan) in zip(parts[1:], plans.items(), strict=False):
        timeline(part.subplots(), plan, label, colours, longest / 1e9)
    if scaling:
        weak_scaling(parts[-1].subplots(), scaling)
    handles: list[Any] = [Patch(facecolor=colour, label=f"p = {p}") for p, colour in colours.items()]
    handles += [
        Patch(facecolor=IDLE, label="idle"),
        Line2D([], [], color="black", linestyle="--", label="lower bound"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path)


def check_path(path: str | Path) -> None:
    """Refuse a place that :func:`draw` could not write to, before anything is simulated.

    Raises:
        ValueError: no such folder, or a suffix that is no format of pictures.
    """
    file, formats = Path(path), FigureCanvasBase.get_supported_filetypes()
    if not file.parent.is_dir() or file.is_dir() or file.suffix[1:].lower() not in formats:
        raise ValueError(
            f"{path} is no picture that can be written; allowed are files in existing folders and the endings "
            f"{', '.join(f'.{suffix}' for suffix in sorted(formats))}"
        )


def timeline(
    axes: Any, plan: IterationPlan, label: str, colours: Mapping[int, str], longest_seconds: float
) -> None:
    """Draw one step: a bar for every micro-batch over the ranks of its group.

    Args:
        axes: where to draw.
        plan: the step.
        label: name of the planner.
        colours: colour of each ``p``.
        longest_seconds: end of the time axis, so that steps can be compared.
    """
    end, ranks = plan.makespan / 1e9, plan.world_size
    axes.add_collection(PolyCollection([_box(0.0, end, 0, ranks)], facecolors=IDLE))
    bars = started(plan)
    axes.add_collection(
        PolyCollection(
            [_box(start / 1e9, (start + m.nanoseconds) / 1e9, m.first_rank, m.sp_size) for m, start in bars],
            facecolors=[colours[m.sp_size] for m, _ in bars],
            edgecolors="white",
            linewidths=0.5 if ranks <= 64 else 0.0,
        )
    )
    if plan.lower_bound:
        axes.axvline(plan.lower_bound / 1e9, color="black", linestyle="--", linewidth=1.0)
    axes.set(xlim=(0.0, longest_seconds * 1.01), ylim=(ranks, 0), ylabel="rank")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axes.set_title(
        f"{label}: step of {plan.num_samples:,} samples, {end:.2f} s, idle {plan.idle_ratio:.1%}",
        loc="left",
        fontsize=9,
        color=INK,
    )
    _plain(axes)


def weak_scaling(axes: Any, scaling: Scaling) -> None:
    """Draw tokens per second and rank over the ranks."""
    for (label, points), colour, dashes in zip(scaling.items(), cycle(COLOURS), cycle(_DASHES), strict=False):
        each = [speed / world for world, speed in points]
        axes.plot([world for world, _ in points], each, dashes, marker="o", color=colour, label=label)
    worlds = sorted({world for points in scaling.values() for world, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
    axes.set(ylim=(0.0, None), xlabel="GPUs, samples of a step in proportion", ylabel="tokens/s per GPU")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("weak scaling", loc="left", fontsize=9, color=INK)
    _plain(axes)


def started(plan: IterationPlan) -> list[tuple[MicroBatch, int]]:
    """Every micro-batch with the nanosecond at which its ranks start it."""
    rounds = [0, *accumulate(plan.rounds())]
    clock, number, found = [0] * plan.world_size, [0] * plan.world_size, []
    for m in sorted(plan.micro_batches, key=lambda m: -m.sp_size):
        start = rounds[number[m.first_rank]] if plan.lockstep else clock[m.first_rank]
        found.append((m, start))
        here = slice(m.first_rank, m.first_rank + m.sp_size)
        clock[here] = [start + m.nanoseconds] * m.sp_size
        number[here] = [number[m.first_rank] + 1] * m.sp_size
    return found


def _throughput(axes: Any, results: Sequence[Simulation]) -> None:
    speeds = [r.tokens_per_second for r in results]
    bars = axes.barh(range(len(results)), speeds, color=COLOURS[0], height=0.7)
    labels = [
        f" {r.tokens_per_second:,.0f}"
        + ("" if r.ratio_to_bucket is None else f" ({r.ratio_to_bucket:.2f} x bucket)")
        for r in results
    ]
    axes.bar_label(bars, labels, fontsize=8, color=INK)
    axes.set_yticks(range(len(results)), [r.planner for r in results])
    axes.set(xlim=(0.0, 1.5 * max(speeds)), ylim=(len(results) - 0.4, -0.6), xticks=[])
    axes.set_title("tokens per second", loc="left", fontsize=9, color=INK)
    _plain(axes)


def _losses(axes: Any, results: Sequence[Simulation]) -> None:
    for offset, name, colour in ((-0.2, "idle", COLOURS[1]), (0.2, "padding", COLOURS[3])):
        shares = [100.0 * (r.idle_ratio if name == "idle" else r.padding_ratio) for r in results]
        bars = axes.barh([k + offset for k in range(len(results))], shares, height=0.36, color=colour, label=name)
        axes.bar_label(bars, [f" {share:.1f} %" for share in shares], fontsize=7, color=INK)
    axes.set(xlim=(0.0, 115.0), xticks=[])
    axes.set_title("idle share of the ranks' time, padding share of the tokens", loc="left", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _plain(axes)


def _box(start: float, end: float, first_rank: int, ranks: int) -> list[tuple[float, float]]:
    return [(start, first_rank), (end, first_rank), (end, first_rank + ranks), (start, first_rank + ranks)]


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
