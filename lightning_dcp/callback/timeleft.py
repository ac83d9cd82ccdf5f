"""Time left: what is still to be trained under the Trainer's limits, priced by the forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from lightning_dcp.cost import IntArray
from lightning_dcp.metrics import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a fit may still go; infinite where nothing limits it.

    Attributes:
        steps: optimizer steps until ``max_steps``.
        epochs: epochs after the current one until ``max_epochs``.
        batches: steps of an epoch as the Trainer counts them; infinite where it does not know.
        done: steps of the current epoch that are done.
        seconds: until ``max_time``.
    """

    steps: float = math.inf
    epochs: float = math.inf
    batches: float = math.inf
    done: int = 0
    seconds: float = math.inf

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Limits:
        """Those of a trainer in its training loop, after a step."""
        max_epochs = trainer.max_epochs
        timers = [c.time_remaining() for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
        return cls(
            steps=max(0, trainer.max_steps - trainer.global_step) if trainer.max_steps >= 0 else math.inf,
            epochs=math.inf if max_epochs is None or max_epochs < 0 else max_epochs - trainer.current_epoch - 1,
            batches=float(trainer.num_training_batches),
            done=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            seconds=min((max(0.0, left) for left in timers if left is not None), default=math.inf),
        )


class TimeLeft:
    """Keeps account of the predicted work of an epoch; each sample is priced, no step is planned.

    Args:
        forecast: prices samples and compares with what was measured.
        tokens: tokens of each sample of the dataset.
    """

    def __init__(self, forecast: Forecast, tokens: IntArray) -> None:
        self._forecast = forecast
        self._tokens = tokens
        self._samples, self._total = len(tokens), forecast.work(tokens)
        self._left_samples, self._left = self._samples, self._total
        self._seen_samples = self._seen_steps = 0

    def begin_epoch(self, left: IntArray, before: int) -> None:
        """An epoch starts, or goes on, with these samples.

        Args:
            left: positions of the samples that are left.
            before: samples of the epoch that were trained before.
        """
        self._left_samples, self._left = len(left), self._forecast.work(self._tokens[left])
        if before == 0:
            self._samples, self._total = self._left_samples, self._left

    def add(self, ids: IntArray, seconds: float) -> None:
        """A step trained on these samples in so many seconds."""
        work = self._forecast.work(self._tokens[ids])
        self._forecast.add(work, seconds)
        self._left -= work
        self._left_samples -= len(ids)
        self._seen_samples += len(ids)
        self._seen_steps += 1

    def seconds(self, limits: Limits) -> float | None:
        """Seconds until the first of the limits; ``None`` where there is none. To be asked after a step."""
        steps, work = self._to_come(limits)
        if steps == 0:
            return 0.0  # not what rounding leaves of the work
        if math.isfinite(steps):
            predicted = self._forecast.ratio * self._forecast.predicted(max(0.0, work), steps)
            return min(predicted, limits.seconds)
        return limits.seconds if math.isfinite(limits.seconds) else None

    def _to_come(self, limits: Limits) -> tuple[float, float]:
        """Steps that are still to be trained, and their predicted work."""
        per_step = self._seen_samples / self._seen_steps
        whole = min(limits.batches, self._samples / per_step)
        mean = self._total / self._samples * per_step
        epoch_steps, epoch_work = self._rest_of_epoch(limits, per_step)
        steps, work = epoch_steps + limits.epochs * whole, epoch_work + limits.epochs * whole * mean
        if limits.steps >= steps:
            return steps, work
        if limits.steps <= epoch_steps:
            return limits.steps, epoch_work * limits.steps / epoch_steps if epoch_steps else 0.0
        return limits.steps, epoch_work + (limits.steps - epoch_steps) * mean

    def _rest_of_epoch(self, limits: Limits, per_step: float) -> tuple[float, float]:
        natural = self._left_samples / per_step
        steps = max(0.0, limits.batches - limits.done) if math.isfinite(limits.batches) else natural
        # The last step of an epoch may be short; an epoch that the Trainer cuts ends many steps earlier.
        whole = steps + 1 > natural
        return steps, self._left if whole else self._left * steps / natural
