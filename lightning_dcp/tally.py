"""What one rank adds up over the micro-batches of a step, and what went wrong in them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dcp.agreement import Consequence
from lightning_dcp.execution import RunningMicroBatch, StepOutcome
from lightning_dcp.plan import MicroBatch
from lightning_dcp.sequence_parallel.context import ExchangeError


@dataclass(slots=True, kw_only=True)
class Tally:
    """What this rank adds up over its micro-batches.

    Attributes:
        count, loss_sum: over the micro-batches so far.
        counts: what each of them counts.
        masks_differ: above zero where the ranks of a group disagreed on a mask.
        problems: reasons why the step is void.
        error: what user code raised on this rank.
        failed: no further micro-batch can run.
    """

    device: torch.device
    count: float | Tensor = 0.0
    loss_sum: float | Tensor = 0.0
    counts: list[float | Tensor] = field(default_factory=list)
    masks_differ: Tensor | None = None
    problems: list[str] = field(default_factory=list)
    error: Exception | None = None
    failed: bool = False

    def fail(self, micro_batch: MicroBatch | None, error: Exception) -> None:
        """Keep what was raised until all ranks know of it; that a peer has left is no reason of this rank's own.

        Args:
            micro_batch: in which it was raised; ``None`` on a rank that has none in this step.
            error: what was raised.
        """
        self.failed = True
        what = f"samples {micro_batch.sample_ids}" if micro_batch is not None else "a rank without samples"
        if isinstance(error, ExchangeError):
            self.problems.append(Consequence(f"{what}: {error}"))
            return
        self.error = error
        text = "".join(traceback.format_exception(error)).strip()
        self.problems.append(f"training_step failed on {what}:\n{text}")

    def add(self, outcome: StepOutcome) -> None:
        """Add what ``training_step`` returned; in float64, as a long step adds up values of different size."""
        self.count = self.count + _double(outcome.count)
        self.counts.append(outcome.count)
        self.loss_sum = self.loss_sum + _double(outcome.objective)

    def close(self, running: RunningMicroBatch) -> None:
        """Take over what the exchanges of a finished micro-batch reported."""
        ids = running.micro_batch.sample_ids
        self.problems += [f"samples {ids}: {reason}" for reason in dict.fromkeys(running.context.failures)]
        if running.context.masks_differ is not None:
            seen = running.context.masks_differ
            self.masks_differ = seen if self.masks_differ is None else self.masks_differ + seen


def _double(value: float | Tensor) -> float | Tensor:
    return value.detach().to(torch.float64) if isinstance(value, Tensor) else value
