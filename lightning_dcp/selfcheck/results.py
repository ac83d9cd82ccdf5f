"""What one way of computing the two samples is, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_dcp.execution import StepOutcome
from lightning_dcp.selfcheck.samples import Row

_TORCH = Path(torch.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to compute the two samples.

    Attributes:
        rows: micro-batches, one after the other on the same group.
        sp_size: ``p``; the first block of that size runs them.
        recompute: recomputed layers per family.
        step: changes the seed of the global random numbers and nothing else.
    """

    rows: tuple[Row, ...]
    sp_size: int = 1
    recompute: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the world computed; equal on all ranks but for the part of the gradient that a rank keeps.

    Attributes:
        problems: why the rest is void; empty if it is valid.
        raised: a rank raised, so that the case must not be run again.
        count: items that all ranks answered for.
        loss: sum of the objectives divided by the count.
        gradients: gradients of the mean, of the parameters whose index is ``rank`` modulo ``W`` (their memory is
            shared over the ranks), float32 or wider.
    """

    problems: tuple[str, ...] = ()
    raised: bool = False
    count: float = 0.0
    loss: float = 0.0
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Share:
    """What one rank adds to a result."""

    problems: list[str] = field(default_factory=list)
    raised: bool = False
    count: float = 0.0
    loss: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)

    def add(self, outcome: StepOutcome, gradients: Sequence[Tensor | None]) -> None:
        """Add a micro-batch: its objective, items and gradients, and what makes it void."""
        self.count += float(outcome.count)
        self.loss += float(outcome.objective.detach())
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        wide = [g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in dense]
        former = self.gradients or [None] * len(wide)
        self.gradients = [_sum(a, b) for a, b in zip(former, wide, strict=True)]
        self.problems += _void(outcome, self.gradients)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _void(outcome: StepOutcome, gradients: Sequence[Tensor | None]) -> list[str]:
    """Why a micro-batch that did not raise is void all the same."""
    problems = list(dict.fromkeys(outcome.context.failures))
    if outcome.context.masks_differ is not None and bool(outcome.context.masks_differ.any()):
        problems.append("the ranks of a group disagree on an attention mask")
    if outcome.suspicious and not all(bool(g.isfinite().all()) for g in gradients if g is not None):
        problems.append(
            "the gradient of a shard without a valid label is not finite; return "
            "lightning_dcp.sequence_parallel.loss_sum(values_BS, mask_BS), which is safe for it"
        )
    return problems


def describe(error: BaseException, module: nn.Module) -> str:
    """An exception in one sentence, with the innermost module that it passed through and the line that caused it."""
    names = {id(part): name for name, part in module.named_modules() if name}
    inside = line = ""
    trace = error.__traceback__
    while trace is not None:
        inside = names.get(id(trace.tb_frame.f_locals.get("self")), inside)
        file = Path(trace.tb_frame.f_code.co_filename)
        if not file.is_relative_to(_TORCH):
            line = f" ({file.name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    lines = str(error).strip().splitlines() or [""]
    where = f" in {inside!r}" if inside else ""
    return f"it raised {type(error).__name__}{where}: {lines[0]}{line}"
