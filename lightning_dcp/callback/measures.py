"""What is computed of each step of a fit, beyond what its record holds."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_dcp.callback.timeleft import Limits, TimeLeft
from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.metrics import Columns, EpochLedger, Forecast, Rates, Waterfall, busy_shares, step_metrics
from lightning_dcp.records import StepRecord

RATE_KEYS = {
    "tokens": "tokens_per_second",
    "padded_tokens": "padded_tokens_per_second",
    "loss_tokens": "loss_tokens_per_second",
    "samples": "samples_per_second",
}
"""Counts of a step and the key of their rate."""


def open_ledger(loader: DCPLoader) -> EpochLedger:
    """The ledger of what is left of the loader's epoch."""
    left, before = loader.left_samples(), loader.sampler.consumed_of_epoch
    dropped = loader.counts().planned - before - len(left)
    return EpochLedger(loader.sampler.epoch, len(loader.shapes), left, (before, dropped))


class Measures:
    """The measures of one fit; the same on every rank but for clock noise and the rank's own memory.

    Args:
        trainer: at the start of its training, under ``DCPStrategy``.
        window: steps of the moving rates.
        peak_flops: FLOP/s that one device can do; ``None`` for what Lightning knows of the device.
    """

    def __init__(self, trainer: pl.Trainer, window: int, peak_flops: float | None) -> None:
        strategy = trainer.strategy
        self._strategy = strategy
        self._loader: DCPLoader = strategy.loader  # type: ignore[attr-defined]
        self._world_size = trainer.world_size
        self._rank = trainer.global_rank
        self._device: torch.device = strategy.root_device
        self._cost = CostModel(strategy.profile)  # type: ignore[attr-defined]
        self._flops = strategy.flops  # type: ignore[attr-defined]
        half = str(trainer.precision).startswith("bf16")
        dtype = torch.bfloat16 if half else torch.float32
        self._peak = peak_flops or get_available_flops(self._device, dtype)
        self._rates = Rates(window)
        tokens: IntArray = self._loader.shapes.prod(axis=1)
        self._size = len(tokens)
        self._left = TimeLeft(Forecast(self._cost, tokens, self._world_size), tokens)
        self.waterfall = Waterfall()
        self.ledger: EpochLedger | None = None
        if self._device.type == "cuda":
            # What the profile and the self-check took is not the training's.
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin_step(self, epoch: int) -> None:
        """A step of an epoch is about to run: at the first, note what the epoch holds."""
        if self.ledger is None or self.ledger.epoch != epoch:
            self.ledger = open_ledger(self._loader)
            left, before = self._loader.left_samples(), self.ledger.before
            self._left.begin_epoch(left, before)

    def of(self, record: StepRecord, seconds: float, limits: Limits) -> dict[str, float]:
        """All values of a step.

        Args:
            record: the finished step.
            seconds: since the end of the step before, so that data loading and the optimizer are included.
            limits: how far the fit may still go.
        """
        columns = Columns.of(record.plan)
        # A sample that an epoch has again goes by another id.
        ids = columns.ids % self._size
        assert self.ledger is not None
        self.ledger.add(ids)
        self._left.add(ids, seconds)
        shares = self.waterfall.add(record.times, busy_shares(columns, self._cost))
        left = self._left.seconds(limits)
        return {
            **self._speeds(record, columns, seconds),
            **step_metrics(record, columns, seconds),
            **({"seconds_left": left} if left is not None else {}),
            **self._memory(record),
            **{f"time_{name}": share for name, share in shares.items()},
            "consumed_samples": float(self._strategy.consumed_samples),  # type: ignore[attr-defined]
            "consumed_tokens": float(self._strategy.consumed_tokens),  # type: ignore[attr-defined]
        }

    def _speeds(self, record: StepRecord, columns: Columns, seconds: float) -> dict[str, float]:
        counts = {
            "tokens": float(columns.num_tokens),
            "padded_tokens": float(columns.num_padded),
            "loss_tokens": record.count,
            "samples": float(len(columns.ids)),
        }
        if self._flops is not None:
            counts["flops"] = self._flops.training(self._loader.shapes[columns.ids % self._size])
        self._rates.add(seconds, counts)
        recent, overall = self._rates.recent(), self._rates.overall()
        speeds = {key: recent[name] for name, key in RATE_KEYS.items()}
        speeds["tokens_per_second_mean"] = overall["tokens"]
        if self._flops is not None:
            speeds["tflops_per_device"] = recent["flops"] / self._world_size / 1e12
            if self._peak:
                speeds["mfu"] = recent["flops"] / (self._world_size * self._peak)
                speeds["mfu_mean"] = overall["flops"] / (self._world_size * self._peak)
        return speeds

    def _memory(self, record: StepRecord) -> dict[str, float]:
        static = self._cost.profile.static_bytes
        mine = [m.bytes for m in record.plan.micro_batches if self._rank in m.ranks]
        memory = {"memory_predicted": float(max(mine, default=static))}
        if self._device.type == "cuda":
            memory["memory_peak"] = float(torch.cuda.max_memory_allocated(self._device))
        return memory
