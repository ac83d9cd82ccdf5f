"""One optimizer step: all micro-batches of this rank, then one vote and one reduction."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.agreement import Agreement, StepError
from lightning_dcp.data.batch import Batch, DCPBatch
from lightning_dcp.engine import ZeroEngine
from lightning_dcp.execution import MicroBatchRunner, RunningMicroBatch, StepOutcome
from lightning_dcp.plan import MicroBatch
from lightning_dcp.records import StepRecord
from lightning_dcp.seeding import seed_from
from lightning_dcp.timing import SpanClock, StepClock, times_of_all


@dataclass(slots=True, kw_only=True)
class _Tally:
    """What this rank adds up over its micro-batches."""

    device: torch.device
    count: float | Tensor = 0.0
    loss_sum: float | Tensor = 0.0
    masks_differ: Tensor | None = None
    problems: list[str] = field(default_factory=list)
    error: Exception | None = None
    counts: list[float | Tensor] = field(default_factory=list)

    def fail(self, micro_batch: MicroBatch, error: Exception) -> None:
        """Keep what user code raised until all ranks know of it."""
        self.error = error
        text = "".join(traceback.format_exception(error)).strip()
        self.problems.append(f"training_step failed on samples {micro_batch.sample_ids}:\n{text}")

    def add(self, outcome: StepOutcome) -> None:
        # Sums in float64: a long step adds up many values of different size.
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


class StepExecutor:
    """Runs the micro-batches of one rank through the Trainer's closure.

    Args:
        runner: opens micro-batches.
        engine: holds back and then triggers the reduction.
        agreement: the world.
        transfer: moves a collated micro-batch to the device, with the user's hooks.
        rank: global rank.
        device: device of this rank.
        waited: seconds that were spent in the loader so far.

    Attributes:
        clock: tells where the time between two steps goes.
    """

    def __init__(
        self,
        *,
        runner: MicroBatchRunner,
        engine: ZeroEngine,
        agreement: Agreement,
        transfer: Callable[[Batch], Batch],
        rank: int,
        device: torch.device,
        waited: Callable[[], float],
    ) -> None:
        self.runner = runner
        self.clock = StepClock(device, waited)
        self._engine = engine
        self.agreement = agreement
        self._transfer = transfer
        self._rank = rank
        self._device = device
        self._running: RunningMicroBatch | None = None
        self._outcome: StepOutcome | None = None
        self._expected = 1.0
        self._counted: list[tuple[float, bool]] = []
        self._tally = _Tally(device=device)

    def run(self, item: DCPBatch, closure: Callable[[int], None]) -> StepRecord:
        """Train one step up to and including the reduction of the gradients.

        Args:
            item: the step.
            closure: runs ``training_step`` (through :meth:`training_step`) and the backward of one micro-batch; it
                is given its index. A rank without a micro-batch calls it once.

        Raises:
            StepError: on all ranks, if the step is void on any; a rank whose own code failed raises that error.
        """
        mine = item.plan.iteration.of_rank(self._rank)
        self._engine.begin()
        self._tally = _Tally(device=self._device)
        self._expected = max(self._agree(item, mine), 1.0)
        # Here all ranks are known to hold the same plan, and none is inside a micro-batch.
        self.runner.groups.ensure({m.sp_size for m in item.plan.iteration.micro_batches})
        clock = SpanClock(self._device)
        for index, micro_batch in enumerate(mine):
            with clock.span():
                self._run_one(item, micro_batch, index, closure)
            if self._tally.error is not None:
                break
        if not mine:
            closure(0)
        record = self._vote(item, clock)
        self._engine.reduce()
        return record

    def training_step(self, call: Callable[[Any], Any]) -> Any:
        """Run the user's ``training_step`` on the opened micro-batch and weight its loss.

        The returned loss has the value that the user returned, so that callbacks see it unscaled, and the
        gradient of this rank's share of the step's mean: DeepSpeed averages over ``W``, so a sum of losses is
        weighted ``W / N`` and a mean over ``n`` items ``W n / N``.

        Args:
            call: calls the user's ``training_step`` with a batch.
        """
        if self._running is None:
            return self._zero()
        result = call(self._running.shard)
        outcome = self.runner.outcome(self._running, result)
        if not outcome.objective.is_floating_point() or not outcome.objective.requires_grad:
            raise ValueError(
                f"training_step returned a loss of type {outcome.loss.dtype} through which no gradient flows; return a "
                "floating-point loss that depends on the parameters, without detach() or item()"
            )
        self._outcome = outcome
        self._tally.add(outcome)
        weighted = outcome.objective * (self.agreement.world_size / self._expected)
        loss = outcome.loss.to(weighted.dtype) + (weighted - weighted.detach())
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    @property
    def counts(self) -> list[float]:
        """What each micro-batch of the last step counted on this rank; after the vote, which waits for the device."""
        return [float(count) for count in self._tally.counts]

    def refuse_collective(self, name: str, instead: str = "gather outside of training_step") -> bool:
        """Whether a collective over the world was asked for inside a micro-batch; the step is void then.

        Ranks run different numbers of micro-batches, so it would meet another rank's vote.

        Args:
            name: the call, as the user wrote it.
            instead: what to write in its place.
        """
        if self._running is None or self.agreement.world_size == 1:
            return False
        self._running.context.failures.append(
            f"{name} was called inside training_step; ranks run different numbers of micro-batches, so no collective "
            f"over all ranks may run there. Instead, {instead}"
        )
        return True

    def refuse_log(self, key: str, arguments: Mapping[str, Any]) -> None:
        """Refuse a ``self.log`` that would reduce over all ranks at each call.

        Args:
            key: what is logged.
            arguments: of Lightning's ``log``, with the defaults of the hook filled in.
        """
        if not (arguments["sync_dist"] and arguments["on_step"]) or arguments["rank_zero_only"]:
            return
        epoch = ", on_epoch=True" if arguments["on_epoch"] else ""
        self.refuse_collective(
            f"self.log({key!r}, ..., on_step=True{epoch}, sync_dist=True)",
            f"write self.log({key!r}, ..., on_step=True, on_epoch=True): the value at each step is the mean over "
            "this rank's micro-batches, that of the epoch is over all ranks also without sync_dist. The exact mean of "
            "the loss over all ranks at each step is logged as 'loss' already",
        )

    def _run_one(
        self,
        item: DCPBatch,
        micro_batch: MicroBatch,
        index: int,
        closure: Callable[[int], None],
    ) -> None:
        try:
            self._train_one(item, micro_batch, index, closure)
        except Exception as error:
            # Alone in its group a rank can go on to the vote and tell the others, who would wait for it; a member of
            # a wider group cannot, since its peers are inside an exchange. Wide groups run first, so none follows.
            if micro_batch.sp_size > 1 or self.agreement.world_size == 1:
                raise
            self._tally.fail(micro_batch, error)

    def _train_one(
        self,
        item: DCPBatch,
        micro_batch: MicroBatch,
        index: int,
        closure: Callable[[int], None],
    ) -> None:
        batch = self._transfer(item.data[index])
        counted = self._counted[index]
        with self.runner.open(micro_batch, batch, epoch=item.epoch, step=item.step, counted=counted) as running:
            self._running = running
            try:
                closure(index)
            finally:
                self._running = None
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome.suspicious and not self._engine.last_gradients_finite():
            running.context.failures.append(
                "this shard has no valid label, and the gradient of the value that training_step returned is not "
                "finite. Return lightning_dcp.sequence_parallel.loss_sum(values_BS, mask_BS), which is safe for it"
            )
        self._tally.close(running)

    def _agree(self, item: DCPBatch, mine: tuple[MicroBatch, ...]) -> float:
        """Count this rank's items before anything is moved, and check that all ranks hold the same plan."""
        problems = [item.error] if item.error else []
        items = 0.0
        if not problems:
            try:
                self._counted = [
                    self.runner.count_unsharded(m, data) for m, data in zip(mine, item.data, strict=True)
                ]
                items = sum(count for count, _ in self._counted)
            except Exception as error:  # user hooks: whatever they raise must reach all ranks
                problems = [f"counting the items of a batch failed: {type(error).__name__}: {error}"]
        digest = seed_from(item.plan.iteration.digest(), item.epoch, item.step) % 2**40
        self.clock.arrived()
        total = self.agreement.begin(digest, items, problems)
        self.clock.begun()
        return total

    def _vote(self, item: DCPBatch, clock: SpanClock) -> StepRecord:
        spans = clock.spans()
        busy = sum(end - start for start, end in spans)
        tally = self._tally
        summands = (tally.count, tally.loss_sum, *self.clock.before_vote().summands(busy))
        try:
            totals = self.agreement.end(summands, tally.masks_differ, tally.problems)
        except StepError as agreed:
            self._engine.abandon()
            if tally.error is not None:
                raise tally.error from agreed
            raise
        if not 0 <= totals.count < math.inf:
            self._engine.abandon()
            raise StepError(
                f"the counts that training_step returned add up to {totals.count} over all ranks; return as "
                '"count" the number of items that "loss" is the sum over, 0 or more'
            )
        if totals.count != self._expected and totals.count > 0:
            # training_step counted otherwise than loss_items: the weights used N = expected, the truth is the vote's.
            self._engine.scale_gradients(self._expected / totals.count)
        self.clock.voted()
        seconds = clock.elapsed()
        world = self.agreement.world_size
        return StepRecord(
            epoch=item.epoch,
            step=item.step,
            plan=item.plan.iteration,
            loss=totals.loss_sum / totals.count if totals.count > 0 else 0.0,
            count=totals.count,
            spans=spans,
            seconds=seconds,
            idle_ratio=max(0.0, 1.0 - totals.seconds[0] / (world * seconds)) if seconds > 0 else 0.0,
            times=times_of_all(totals.seconds, seconds, world),
        )

    def _zero(self) -> Tensor:
        """Zero with a gradient for every trainable parameter: what an empty rank contributes."""
        terms = [p.sum() for p in self.runner.module.parameters() if p.requires_grad]
        return torch.stack([term.float() for term in terms]).sum() * 0.0
