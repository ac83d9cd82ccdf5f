"""What a run shows at its end: a table of the whole run and a picture of one step. Plain values in, no torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lightning_dcp.plan import IterationPlan, MicroBatch

Span = tuple[float, float]
"""Start and end of a micro-batch on one rank, in seconds."""
Spans = Sequence[Sequence[Span]]
"""One sequence per rank, in the order of ``plan.of_rank(rank)``."""
LABELS = {
    "useful": "useful",
    "padding": "padding",
    "recompute": "recompute",
    "sequence_parallel": "sequence parallelism",
    "idle": "idle",
    "update": "optimizer and sync",
    "data": "waiting for data",
    "other": "callbacks and loop",
}
"""The parts of the time of all ranks, as they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step as it was planned and as it went.

    Attributes:
        plan: what every rank did.
        seconds: time from the start of the step to the end of the optimizer's update.
        idle: measured idle ratio: the share of ``W * seconds`` of the micro-batches in which ranks wait. ``None``
            where it was not measured.
    """

    plan: IterationPlan
    seconds: float
    idle: float | None = None

    def __post_init__(self) -> None:
        if self.seconds <= 0.0:
            raise ValueError(f"a step of {self.seconds} seconds; it must be longer than zero")


def planned_spans(plan: IterationPlan) -> list[list[Span]]:
    """When each rank runs each of its micro-batches according to the plan, in seconds from the step's start."""
    spans = []
    for rank in range(plan.world_size):
        ends = list(accumulate(m.nanoseconds / 1e9 for m in plan.of_rank(rank)))
        spans.append(list(zip([0.0, *ends[:-1]], ends, strict=True)) if ends else [])
    return spans


def measured_idle(spans: Spans) -> float:
    """Share of ``W * (last end - first start)`` that no micro-batch fills: Eq. 3 on measured times."""
    flat = [span for rank in spans for span in rank]
    if not flat:
        return 0.0
    length = max(end for _, end in flat) - min(start for start, _ in flat)
    busy = sum(end - start for start, end in flat)
    return 1.0 - busy / (len(spans) * length) if length > 0.0 else 0.0


def most_varied(plans: Sequence[IterationPlan]) -> int:
    """Index of the plan that shows most: most different p, then r, then g; the first of equals.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("no step was recorded, so none can be chosen; let the run make at least one step")

    def variety(index: int) -> tuple[int, int, int]:
        sp_sizes = {m.sp_size for m in plans[index].micro_batches}
        depths = {m.recompute for m in plans[index].micro_batches}
        return len(sp_sizes), len(depths), len(_numbers_of_micro_batches(plans[index]))

    return max(range(len(plans)), key=variety)


def summary_table(
    records: Sequence[StepReport],
    *,
    loss_before: float | None = None,
    loss_after: float | None = None,
    waterfall: Mapping[str, float] | None = None,
) -> str:
    """The closing table of a run.

    Ratios are those of the whole run: each step counts with its length. "Steps with" says in how many steps a
    value of p (SP size of a micro-batch), g (micro-batches of a rank) or r (recomputed layers) occurred.

    Args:
        records: the steps, in order.
        loss_before: held-out loss before the first step.
        loss_after: held-out loss after the last.
        waterfall: where the time of all ranks went, as ``DCPCallback.waterfall()`` gives it.

    Raises:
        ValueError: there is no record.
    """
    if not records:
        raise ValueError("no step was recorded, so there is nothing to sum up; let the run make at least one step")
    seconds = sum(record.seconds for record in records)
    tokens = sum(record.plan.num_tokens for record in records)
    rows = [
        ("steps", f"{len(records)} in {seconds:.1f} s, {sum(r.plan.num_samples for r in records):,} samples"),
        ("tokens per second", f"{tokens / seconds:,.0f}"),
        ("idle", _idle(records)),
        ("padding", f"{_padding(records):.1%} of the computed tokens"),
        ("gap to the lower bound", _gap(records)),
        ("steps with p =", _histogram({m.sp_size for m in r.plan.micro_batches} for r in records)),
        ("steps with g =", _histogram(_numbers_of_micro_batches(r.plan) for r in records)),
        ("steps with r =", _histogram({m.recompute for m in r.plan.micro_batches} for r in records)),
    ]
    if loss_before is not None and loss_after is not None:
        rows.insert(0, ("held-out loss", f"{loss_before:.4f} before, {loss_after:.4f} after"))
    if waterfall is not None:
        rows.append(
            ("time of all ranks", ", ".join(f"{share:.1%} {LABELS[name]}" for name, share in waterfall.items()))
        )
    return "\n".join(_row(label, value) for label, value in rows)


def _row(label: str, value: str) -> str:
    return textwrap.fill(value, 100, initial_indent=f"{label:<24}", subsequent_indent=" " * 24)


def _numbers_of_micro_batches(plan: IterationPlan) -> set[int]:
    # Not of_rank(): a long run on many ranks asks for every rank of every step.
    changes = [0] * (plan.world_size + 1)
    for m in plan.micro_batches:
        changes[m.first_rank] += 1
        changes[m.first_rank + m.sp_size] -= 1
    return set(accumulate(changes[:-1]))


def _idle(records: Sequence[StepReport]) -> str:
    length = sum(r.plan.world_size * r.plan.makespan for r in records)
    busy = sum(int(r.plan.busy().sum()) for r in records)
    measured = [(r.idle, r.seconds) for r in records if r.idle is not None]
    text = f"{1.0 - busy / length:.1%} planned" if length else "not planned"
    if not measured:
        return f"{text}, not measured"
    mean = sum(idle * seconds for idle, seconds in measured) / sum(seconds for _, seconds in measured)
    return f"{text}, {mean:.1%} measured"


def _padding(records: Sequence[StepReport]) -> float:
    padded = sum(m.padded_tokens for r in records for m in r.plan.micro_batches)
    return 1.0 - sum(r.plan.num_tokens for r in records) / padded if padded else 0.0


def _gap(records: Sequence[StepReport]) -> str:
    bounded = [r.plan for r in records if r.plan.lower_bound]
    if not bounded:
        return "the planner gave none"
    mean = sum(plan.makespan for plan in bounded) / sum(plan.lower_bound for plan in bounded) - 1.0
    return f"{mean:.1%} on the whole, {max(plan.gap for plan in bounded):.1%} in the worst step"


def _histogram(values_of_steps: Iterable[Iterable[int | tuple[int, ...]]]) -> str:
    counts = Counter(value for values in values_of_steps for value in values)
    return ", ".join(f"{_name(value)}: {count}" for value, count in sorted(counts.items()))


def _name(value: int | tuple[int, ...]) -> str:
    return "+".join(str(v) for v in value) or "0" if isinstance(value, tuple) else str(value)


def describe(micro_batch: MicroBatch) -> str:
    """Batch size and recomputed layers in a few characters, as written into the picture: ``4·r2``."""
    recompute = _name(micro_batch.recompute)
    return (
        str(micro_batch.batch_size) if not any(micro_batch.recompute) else f"{micro_batch.batch_size}·r{recompute}"
    )


def plot_timeline(plan: IterationPlan, measured_spans: Spans | None, path: str | Path) -> None:
    """Draw one step: the planned timeline of the ranks above the measured one, on one time axis.

    Args:
        plan: the step.
        measured_spans: seconds on one clock, for each rank the (start, end) of each of its micro-batches in the
            order of ``plan.of_rank(rank)``. The earliest start becomes zero. ``None`` draws the plan alone.
        path: where to write the PNG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the spans do not belong to the plan.
    """
    moved = None if measured_spans is None else _from_zero(plan, measured_spans)
    try:
        from lightning_dcp._timeline import draw
    except ImportError as error:
        raise _without_matplotlib("the timeline") from error
    draw(plan, planned_spans(plan), moved, Path(path))


def _from_zero(plan: IterationPlan, measured_spans: Spans) -> Spans:
    """The spans behind the earliest start, if they belong to the plan."""
    expected = [len(plan.of_rank(rank)) for rank in range(plan.world_size)]
    found = [len(spans) for spans in measured_spans]
    if found != expected:
        raise ValueError(f"spans of {found} micro-batches per rank; the plan has {expected}")
    start = min((s for spans in measured_spans for s, _ in spans), default=0.0)
    return [[(s - start, e - start) for s, e in spans] for spans in measured_spans]


def plot_waterfall(waterfall: Mapping[str, float], path: str | Path) -> None:
    """Draw where the time of all ranks went: from the whole down to what was useful, part by part.

    Args:
        waterfall: shares that add up to 1, as ``DCPCallback.waterfall()`` gives them.
        path: where to write the PNG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the shares have other names, or do not add up to 1.
    """
    if waterfall.keys() != LABELS.keys() or abs(sum(waterfall.values()) - 1.0) > 0.01:
        raise ValueError(
            f"shares {dict(waterfall)} add up to {sum(waterfall.values()):.3f}; needed are {', '.join(LABELS)}, which "
            "add up to 1. Take DCPCallback.waterfall() after at least one step"
        )
    try:
        from lightning_dcp._waterfall import draw
    except ImportError as error:
        raise _without_matplotlib("the waterfall") from error
    draw([(LABELS[name], waterfall[name]) for name in LABELS], Path(path))


def _without_matplotlib(what: str) -> ImportError:
    return ImportError(
        f"{what} is drawn with matplotlib, which is not installed; "
        "install it with: pip install 'lightning-dcp[plots]'"
    )
