"""One optimizer step: all micro-batches of this rank, then one vote and one reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from lightning_dcp.sequence_parallel.context import ExchangeError
from lightning_dcp.tally import Tally
from lightning_dcp.timing import SpanClock, StepClock, times_of_all
from lightning_dcp.watchdog import BETWEEN, Watchdog, Whereabouts, explained, place_of, timed_out


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
        where: the place of this rank, for errors.
        watchdog: tells the places of all ranks where a collective waits too long; ``None`` with one rank.
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
        self.where = Whereabouts(rank)
        self.watchdog: Watchdog | None = None
        self._engine = engine
        self.agreement = agreement
        self._transfer = transfer
        self._rank = rank
        self._device = device
        self._running: RunningMicroBatch | None = None
        self._outcome: StepOutcome | None = None
        self._expected = 1.0
        self._counted: list[tuple[float, bool]] = []
        self._tally = Tally(device=device)

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
        self.where.step(item.epoch, item.step)
        self._engine.begin()
        self._tally = Tally(device=self._device)
        with explained(self.where, self.watchdog, "waiting for the others at the start of the step", []):
            self._expected = max(self._agree(item, mine), 1.0)
            # Here all ranks are known to hold the same plan, and none is inside a micro-batch.
            self.runner.groups.ensure({m.sp_size for m in item.plan.iteration.micro_batches})
        clock = SpanClock(self._device)
        for index, micro_batch in enumerate(mine):
            self.where.enter(micro_batch, index, len(mine))
            with clock.span():
                self._run_one(item, micro_batch, index, closure)
            if self._tally.failed:
                break
        self.where.leave()
        if not mine:
            self._run_empty(closure)
        doing = "waiting for the others in the vote at the end of the step"
        with explained(self.where, self.watchdog, doing, self._tally.problems):
            record = self._vote(item, clock)
        with explained(self.where, self.watchdog, "reducing the gradients over all ranks", []):
            self._engine.reduce()
        self.where.at(BETWEEN)
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

    def _run_empty(self, closure: Callable[[int], None]) -> None:
        """The backward of a rank without a micro-batch: hooks run there too, and what they raise is for all ranks."""
        try:
            closure(0)
        except Exception as error:
            if self.agreement.world_size == 1:
                raise
            self._tally.fail(None, error)

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
            # The rank goes on to the vote and tells the others, who would wait for it. Its peers in a wider group are
            # inside an exchange, or come to one later, which raises as this rank has left its groups: they come to the
            # vote too. All their later groups are parts of this one, as wide groups run first.
            if self.agreement.world_size == 1:
                raise
            if micro_batch.sp_size > 1:
                self.runner.groups.leave(error)
            if isinstance(error, ExchangeError) and timed_out(error):
                # The rank that is missing would not come to the vote either.
                raise StepError(place_of(error, self.where, self.watchdog)) from error
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
        mine = self.clock.before_vote()
        summands = (tally.count, tally.loss_sum, *mine.summands(busy))
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
        seconds = clock.elapsed()
        self.clock.voted(seconds)
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
            times=times_of_all(totals.seconds, mine, seconds, world),
        )

    def _zero(self) -> Tensor:
        """Zero with a gradient for every trainable parameter: what an empty rank contributes."""
        terms = [p.sum() for p in self.runner.module.parameters() if p.requires_grad]
        return torch.stack([term.float() for term in terms]).sum() * 0.0
