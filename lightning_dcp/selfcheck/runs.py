"""Runs of the two samples: count and gradient of the whole world for one way of computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner, StepOutcome
from lightning_dcp.plan import MicroBatch
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.selfcheck.conditions import alone, conditions, in_float32, still
from lightning_dcp.selfcheck.samples import Row
from lightning_dcp.topology import World

T = TypeVar("T")


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
class _Share:
    """What one rank adds to a result."""

    problems: list[str] = field(default_factory=list)
    raised: bool = False
    count: float = 0.0
    loss: float = 0.0
    gradients: list[Tensor | None] = field(default_factory=list)

    def add(self, outcome: StepOutcome, gradients: Sequence[Tensor | None]) -> None:
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
        problems.append("an attention mask was given on some ranks of the group only")
    if outcome.suspicious and not all(bool(g.isfinite().all()) for g in gradients if g is not None):
        problems.append(
            "the gradient of a shard without a valid label is not finite; return "
            "lightning_dcp.sequence_parallel.loss_sum(values_BS, mask_BS), which is safe for it"
        )
    return problems


class Bench:
    """Runs cases on the user's module and leaves it as it was.

    Args:
        runner: opens micro-batches.
        load: gives the collated, unsharded batch of a micro-batch, on the device.
        world: the ranks and their groups.
        rank: this rank.
        device: where reduced tensors live.
        num_layers: layers of each family that can be recomputed.

    Attributes:
        upcast: run in float32 whatever the precision of the weights, and without autocast.
    """

    def __init__(
        self,
        *,
        runner: MicroBatchRunner,
        load: Callable[[MicroBatch], Batch],
        world: World,
        rank: int,
        device: torch.device,
        num_layers: tuple[int, ...],
    ) -> None:
        self.runner = runner
        self.module = runner.module
        self.world = world
        self.rank = rank
        self.num_layers = num_layers
        self.upcast = True
        self._load = load
        self._device = device
        self.parameter_names = [name for name, p in self.module.named_parameters() if p.requires_grad]

    def run(self, case: Case, observer: AbstractContextManager[Any] | None = None) -> Result:
        """Called by every rank of the world; the ranks outside of the case's block contribute nothing.

        With ``p > 1`` each rank first rehearses alone. Only if no rank raised the exchanges are made, since the
        others would wait in them for a rank that has left. What raises in the second run only (because exchanged
        values differ from the rehearsed ones) is found when the group's timeout ends.

        Args:
            case: what to run.
            observer: open while this rank runs.
        """
        member = self.rank in self.block(case.sp_size)
        share = _Share()
        if member and case.sp_size > 1:
            with alone():
                share = self._attempt(case, self.block(case.sp_size)[0])
            # What the exchange refused is told again, and with the module's name, by the real run.
            share = _Share(problems=share.problems if share.raised else [], raised=share.raised)
        if case.sp_size > 1 and any(self.everyone(share.raised)):
            return self._total(share)
        if member:
            with observer or nullcontext():
                share = self._attempt(case, self.block(case.sp_size)[0])
        return self._total(share)

    def run_here(self, case: Case, observer: AbstractContextManager[Any]) -> None:
        """Run a case with ``p = 1`` on this rank, only to be observed; nothing is communicated.

        Args:
            case: what to run.
            observer: open while it runs.
        """
        with observer:
            self._attempt(case, self.rank)

    def block(self, sp_size: int) -> range:
        """Ranks that run the cases of a sequence-parallel size."""
        first, size = self.world.blocks_of(sp_size)[0]
        return range(first, first + size)

    def everyone(self, value: T) -> list[T]:
        """A small value of every rank, in rank order; called by every rank."""
        if self.world.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(values, value)
        return values

    def summed(self, tensor: Tensor) -> Tensor:
        """Sum over the world; called by every rank, once per parameter of a result and once per comparison."""
        tensor = tensor.to(self._device)
        if self.world.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _attempt(self, case: Case, first_rank: int) -> _Share:
        """The share of this rank; an exception becomes a problem, so that all ranks stay in step."""
        share = _Share()
        try:
            for row in case.rows:
                self._one(row.micro_batch(first_rank, case.sp_size, case.recompute), case.step, share)
        except Exception as error:
            return _Share(problems=[describe(error, self.module)], raised=True)
        return share

    def _one(self, micro_batch: MicroBatch, step: int, share: _Share) -> None:
        """One micro-batch, from the state in which the module was found."""
        batch = self._load(micro_batch)
        with ExitStack() as stack:
            stack.enter_context(untouched(self.module))
            stack.enter_context(conditions(upcast=self.upcast))
            still(self.module, upcast=self.upcast)
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            outcome = stack.enter_context(
                self.runner.step(micro_batch, in_float32(batch) if self.upcast else batch, step=step)
            )
            gradients: Sequence[Tensor | None] = [None] * len(parameters)
            if outcome.objective.requires_grad:
                gradients = torch.autograd.grad(outcome.objective, parameters, allow_unused=True)
        share.add(outcome, gradients)

    def _total(self, share: _Share) -> Result:
        shares = self.everyone((share.problems, share.raised, share.count, share.loss))
        problems = tuple(dict.fromkeys(text for texts, *_ in shares for text in texts))
        count = sum(c for _, _, c, _ in shares)
        raised = any(r for _, r, _, _ in shares)
        if problems or count <= 0:
            return Result(problems=problems, raised=raised, count=count)
        return Result(
            count=count,
            loss=sum(x for *_, x in shares) / count,
            gradients=self._gradients(share, count),
        )

    def _gradients(self, share: _Share, count: float) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for index, parameter in enumerate(parameters):
            mine = share.gradients[index] if share.gradients else None
            if mine is None:
                mine = torch.zeros(parameter.shape, device=self._device)
            else:
                share.gradients[index] = None
            total = self.summed(mine.to(torch.float64)) / count
            if index % self.world.world_size == self.rank:
                kept[index] = total.to(torch.promote_types(parameter.dtype, torch.float32))
        return kept


def describe(error: BaseException, module: nn.Module) -> str:
    """An exception in one sentence, with the innermost module that it passed through."""
    names = {id(part): name for name, part in module.named_modules() if name}
    inside = ""
    trace = error.__traceback__
    while trace is not None:
        inside = names.get(id(trace.tb_frame.f_locals.get("self")), inside)
        trace = trace.tb_next
    lines = str(error).strip().splitlines() or [""]
    where = f" in {inside!r}" if inside else ""
    return f"it raised {type(error).__name__}{where}: {lines[0]}"
