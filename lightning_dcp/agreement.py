"""The two small world all-reduces of a step: before the first micro-batch and after the last.

No other world collective runs while ranks may be inside micro-batches. Each carries a flag, so that a problem
of one rank is raised on all of them instead of leaving the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class StepError(RuntimeError):
    """A step cannot be trained; raised on every rank with the reasons of all of them."""


class Consequence(str):
    """A problem that follows from one of another rank; told only where nobody has another."""

    __slots__ = ()


_HALF = 20
"""Bits of each half of a digest; squares of halves summed over 8192 ranks stay exact in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over all ranks at the end of a step.

    Attributes:
        count: items that the ranks answered for.
        loss_sum: sum of the losses of all items.
        seconds: of what the ranks timed, in the order in which it was given.
    """

    count: float
    loss_sum: float
    seconds: tuple[float, ...]


class Agreement:
    """Talks to the whole world on behalf of one rank.

    Args:
        world_size: number of ranks; with one nothing is communicated.
        device: device of the reduced tensors (CUDA under NCCL).

    Attributes:
        stop_asked: this rank was told to end the run; set from a signal handler, at any time.
        stopping: any rank was told so before the running step began; equal on all ranks.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.stop_asked = False
        self.stopping = False
        self._device = device

    def begin(self, digest: int, items: float, problems: Sequence[str]) -> float:
        """Called by every rank once per step, before its first micro-batch; returns the step's number of items ``N``.

        Args:
            digest: 40-bit fingerprint of plan, epoch and step.
            items: items of this rank.
            problems: reasons why this rank cannot train the step.

        Raises:
            StepError: on all ranks, if any rank has a problem or the digests differ.
        """
        low, high = digest & (2**_HALF - 1), digest >> _HALF
        mine = [float(bool(problems)), items, low, low * low, high, high * high, float(self.stop_asked)]
        failed, total, *sums, stops = self._sum(torch.tensor(mine, dtype=torch.float64))
        self.stopping = stops > 0
        if failed:
            self._raise(problems)
        # sum(x)^2 = W * sum(x^2) holds exactly when all x are equal (Cauchy-Schwarz), so all ranks see the same
        # verdict from sums alone.
        if any(sums[i] * sums[i] != self.world_size * sums[i + 1] for i in (0, 2)):
            raise StepError(
                f"the ranks have different plans for this step (digest {digest:#x} here). Plans follow from the data's "
                "lengths, the profile and the strategy's settings: check that dataset, files and arguments are the "
                "same on all ranks"
            )
        return total

    def end(
        self, totals: Sequence[Tensor | float], masks_differ: Tensor | None, problems: Sequence[str]
    ) -> StepTotals:
        """Called by every rank once per step, after its last backward and before the gradients are reduced.

        Args:
            totals: count, loss sum and any number of timed seconds of this rank.
            masks_differ: above zero where the ranks of a group disagreed on an attention mask; on the device.
            problems: reasons why this rank's gradients are void.

        Raises:
            StepError: on all ranks, if any rank has a problem.
        """
        vector = torch.zeros(2 + len(totals), dtype=torch.float64, device=self._device)
        vector[0] = float(bool(problems))
        if masks_differ is not None:
            vector[1] = masks_differ.to(torch.float64).sum()
        for index, value in enumerate(totals):
            vector[2 + index] = value
        failed, differ, count, loss_sum, *seconds = self._sum(vector)
        if failed or differ:
            self._raise([*problems, *([_MASKS_DIFFER] if differ else [])])
        return StepTotals(count=count, loss_sum=loss_sum, seconds=tuple(seconds))

    def _sum(self, vector: Tensor) -> list[float]:
        if self.world_size > 1:
            vector = vector.to(self._device)
            dist.all_reduce(vector)
        values: list[float] = vector.tolist()
        return values

    def _raise(self, problems: Sequence[str]) -> None:
        """Exchange the reasons and raise the same error everywhere; all ranks come here or none."""
        everyones = of_all_ranks(list(problems), self.world_size)
        told = [(rank, problem) for rank, reasons in enumerate(everyones) for problem in reasons]
        causes = [pair for pair in told if not isinstance(pair[1], Consequence)]
        raise StepError("\n".join(dict.fromkeys(f"rank {rank}: {problem}" for rank, problem in causes or told)))


def of_all_ranks(value: T, world_size: int) -> list[T]:
    """A small value of every rank, in rank order; one gather, called by every rank.

    Args:
        value: that of this rank.
        world_size: number of ranks; with one nothing is communicated.
    """
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def raise_together(error: Exception | None, world_size: int, doing: str) -> None:
    """Raise on every rank what any of them met, its own on a rank that has one; one small gather, by every rank.

    Args:
        error: what this rank met.
        world_size: number of ranks; with one nothing is communicated.
        doing: what failed, for the sentence.

    Raises:
        StepError: another rank has an error and this one has none.
    """
    mine = None if error is None else f"{doing} failed with {type(error).__name__}: {error}"
    everyones = of_all_ranks(mine, world_size)
    if error is not None:
        raise error
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(everyones) if text is not None]
    if lines:
        raise StepError("\n".join(lines))


_MASKS_DIFFER = (
    "an attention mask was given on some ranks of a sequence-parallel group only, so part of the heads ignored it. "
    "Pass the mask on every shard (also where it is all True), or set sp_sizes=[1]"
)
