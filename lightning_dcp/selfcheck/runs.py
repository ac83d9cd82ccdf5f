"""Runs of the two samples: count and gradient of the whole world for one way of computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.plan import MicroBatch
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.selfcheck.conditions import alone, conditions, in_float32, still
from lightning_dcp.selfcheck.results import Case, Result, Share, describe
from lightning_dcp.selfcheck.samples import Row
from lightning_dcp.topology import World

T = TypeVar("T")


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
        self.runner.groups.ensure([case.sp_size])
        member = self.rank in self.block(case.sp_size)
        share = Share()
        if member and case.sp_size > 1:
            with alone():
                share = self._attempt(case, self.block(case.sp_size)[0])
            # What the exchange refused is told again, and with the module's name, by the real run.
            share = Share(problems=share.problems if share.raised else [], raised=share.raised)
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

    def items(self, row: Row) -> float:
        """Items of a micro-batch, counted by this rank without running it; 0 where that fails."""
        micro_batch = row.micro_batch(self.rank, 1, ())
        try:
            return self.runner.count_unsharded(micro_batch, self._load(micro_batch))[0]
        except Exception:
            # The run itself tells what is wrong, on all ranks.
            return 0.0

    def everyone(self, value: T) -> list[T]:
        """A small value of every rank, in rank order; called by every rank."""
        return of_all_ranks(value, self.world.world_size)

    def summed(self, tensor: Tensor) -> Tensor:
        """Sum over the world; called by every rank, once per parameter of a result and once per comparison."""
        tensor = tensor.to(self._device)
        if self.world.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _attempt(self, case: Case, first_rank: int) -> Share:
        """The share of this rank; an exception becomes a problem, so that all ranks stay in step."""
        share = Share()
        try:
            for row in case.rows:
                self._one(row.micro_batch(first_rank, case.sp_size, case.recompute), case.step, share)
        except Exception as error:
            return Share(problems=[describe(error, self.module)], raised=True)
        return share

    def _one(self, micro_batch: MicroBatch, step: int, share: Share) -> None:
        """One micro-batch, from the state in which the module was found."""
        with ExitStack() as stack:
            stack.enter_context(untouched(self.module))
            batch = self._load(micro_batch)
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

    def _total(self, share: Share) -> Result:
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

    def _gradients(self, share: Share, count: float) -> dict[int, Tensor]:
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
