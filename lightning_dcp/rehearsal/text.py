"""A dry run on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import IterationPlan
from lightning_dcp.wording import counted, gigabytes, labelled, percent, table

if TYPE_CHECKING:
    from lightning_dcp.rehearsal.facts import DryRun, Family


def text_of(run: DryRun) -> str:
    """All that a dry run found, in paragraphs and tables."""
    ranks = counted(run.world_size, "rank")
    head = f"Dry run on {ranks} ({run.device}, {run.precision}). No step was made."
    paragraphs = [labelled(label, text) for label, text in _paragraphs(run)]
    tables = [_profile_table(run), _plan_table(run)]
    return "\n\n".join([head, "\n".join(paragraphs), *tables, labelled("an epoch", _epoch(run))])


def _paragraphs(run: DryRun) -> Iterator[tuple[str, str]]:
    yield "layers", "; ".join(map(_family, run.families)) or "none repeats, so nothing can be recomputed"
    yield "attention", _attention(run)
    sizes = ", ".join(map(str, run.sp_sizes))
    out = [f"{', '.join(map(str, left))}: {reason}" for reason, left in run.left_out.items()]
    yield "p", f"{sizes}{' (not used: ' + '; '.join(out) + ')' if out else ''}"
    held, limit = run.profile.static_bytes, run.limits.memory_bytes
    yield (
        "memory",
        f"{gigabytes(limit)} a rank, of which {gigabytes(held)} are held by weights, gradients and optimizer",
    )
    yield "self-check", _self_check(run)
    for finding in run.findings:
        yield "", finding
    yield "profile", f"{run.profile_from}; the end of a step takes {run.profile.sync_time / 1e6:,.1f} ms"


def _family(family: Family) -> str:
    millions = f"{family.parameters / 1e6:,.2f} million parameters"
    return f"{family.layers} x {family.class_name} in {family.name!r} ({millions})"


def _attention(run: DryRun) -> str:
    if not run.heads:
        return "no call of scaled_dot_product_attention was seen in training_step"
    heads = [f"{heads} heads" if heads == kv else f"{heads} heads, {kv} for keys" for heads, kv in run.heads]
    return f"{'; '.join(heads)}; kernel {', '.join(run.kernels)}"


def _self_check(run: DryRun) -> str:
    if not run.self_check:
        return "off"
    off = [
        *(["padding"] if run.exact_shapes else []),
        *(f"p = {p}" for p in run.left_out.get("the self-check found another result", ())),
        *([] if run.recompute else ["recomputation"]),
    ]
    if off:
        return f"switched off: {', '.join(off)}"
    if run.findings:
        return "nothing switched off, but:"
    sizes = f", p = {', '.join(map(str, run.sp_sizes))}" if len(run.sp_sizes) > 1 else ""
    layers = ", recomputation" if run.families else ""
    return f"passed: padding{sizes}{layers}"


def _profile_table(run: DryRun) -> str:
    """Time and memory of one sample alone, nothing recomputed, for each measured length and each ``p``."""
    cost = CostModel(run.profile)
    sizes = [p for p in run.sp_sizes if p in cost.sp_sizes]
    measured = {(m.shape, m.sp_size) for m in run.profile.measurements}
    rows = [["one sample of", *(cell for p in sizes for cell in (f"ms, p = {p}", "memory"))]]
    for shape in sorted({shape for shape, _ in measured}, key=lambda shape: (prod(shape), shape)):
        row = [f"{' x '.join(map(str, shape))} tokens"]
        for p in sizes:
            found = (shape, p) in measured
            row.append(f"{cost.nanoseconds(1, shape, p, ()) / 1e6:,.1f}" if found else "-")
            row.append(gigabytes(cost.bytes(1, shape, p, ())) if found else "-")
        rows.append(row)
    return table(rows)


def _plan_table(run: DryRun) -> str:
    head = (
        "step",
        "samples",
        "tokens",
        "micro-batches of p",
        "b",
        "r",
        "seconds",
        "idle",
        "padding",
        "gap",
        "memory",
    )
    rows = [head, *((str(number), *_plan(plan)) for number, plan in enumerate(run.plans, start=1))]
    return f'planner "{run.planner}"\n{table(rows)}' if run.plans else "no step is left to be planned"


def _plan(plan: IterationPlan) -> tuple[str, ...]:
    counts = Counter(m.sp_size for m in plan.micro_batches)
    return (
        f"{plan.num_samples:,}",
        f"{plan.num_tokens:,}",
        ", ".join(f"{p}: {count}" for p, count in sorted(counts.items())),
        _range([m.batch_size for m in plan.micro_batches]),
        _range([sum(m.recompute) for m in plan.micro_batches]),
        f"{plan.makespan / 1e9:,.3f}",
        percent(plan.idle_ratio),
        percent(plan.padding_ratio),
        percent(plan.gap) if plan.lower_bound else "-",
        gigabytes(max((m.bytes for m in plan.micro_batches), default=0)),
    )


def _range(values: Sequence[int]) -> str:
    least, most = min(values, default=0), max(values, default=0)
    return str(least) if least == most else f"{least} to {most}"


def _epoch(run: DryRun) -> str:
    steps = f"{'' if run.num_steps is not None else 'about '}{counted(run.steps_of_epoch, 'step')}"
    return (
        f"{run.num_samples:,} samples, {run.num_tokens:,} tokens, {steps}: about {_duration(run.seconds_of_epoch)} by "
        "the profile, if the first steps are like the others"
    )


def _duration(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200.0 else f"{seconds / 3600:,.1f} hours"
