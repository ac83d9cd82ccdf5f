"""``DCPCallback``: logs every step, keeps records and receipts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.callback.measures import Measures, open_ledger
from lightning_dcp.callback.planfile import append, keep_lines
from lightning_dcp.callback.timeleft import Limits
from lightning_dcp.data.leaving import LEFT_OUT_FILE
from lightning_dcp.metrics import GapWatch, Receipt, Waterfall, resume_line
from lightning_dcp.records import Span, StepRecord
from lightning_dcp.upstream import forget_of_step, log_of_step, logged_by_user

PREFIX = "dcp/"


class DCPCallback(pl.Callback):
    """Logs every step and keeps its record; ``DCPStrategy`` adds one where none was given.

    The keys begin with ``dcp/`` and are the same on every rank and in every step; docs/metrics.md defines them. The
    exact mean loss of a step is ``dcp/loss`` and, unless user code logs a value of that name, also ``loss``. Everything
    is known to every rank already, so nothing is communicated.

    Args:
        prog_bar: keys, without prefix, that the progress bar shows.
        plans_file: file that rank 0 writes one JSON line per step to; the plans can be trained again with
            ``DCPStrategy(planner=Replay(file))``. A new run begins it anew; a resumed one goes on behind the step of
            its checkpoint, as the later steps are planned again.
        keep_records: steps whose records are kept in memory for :meth:`timeline`, the latest ones.
        window: steps that the rates are taken over.
        peak_flops: FLOP/s that one device can do, for MFU; by default what Lightning knows of the device. Where it
            knows nothing (a CPU) MFU is not logged.

    Attributes:
        records: records of the latest steps.
        metrics: what was logged of them, without prefix.
        receipts: what became of the samples: one at the start of a fit that resumes, one for each epoch.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        prog_bar: Sequence[str] = ("loss", "tokens_per_second", "idle_measured"),
        plans_file: str | Path | None = None,
        keep_records: int = 1024,
        *,
        window: int = 20,
        peak_flops: float | None = None,
    ) -> None:
        if type(window) is not int or window < 1:
            raise ValueError(f"window is {window!r}; allowed are integers from 1")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(
                f"peak_flops is {peak_flops!r}; allowed are the FLOP/s of one device, above 0, or None"
            )
        self.prog_bar = tuple(prog_bar)
        self.plans_file = Path(plans_file) if plans_file is not None else None
        self.keep_records = keep_records
        self.window = window
        self.peak_flops = peak_flops
        self.records: list[StepRecord] = []
        self.metrics: list[dict[str, float]] = []
        self.receipts: list[Receipt] = []
        self._last_end = 0.0
        self._gaps = GapWatch()
        self._measures: Measures | None = None
        self._steps_aside = False

    # --- the hooks ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, since a run that resumes within an epoch starts none, and on rank 0 the files."""
        self._gaps, self._steps_aside = GapWatch(), False
        self._measures = Measures(trainer, self.window, self.peak_flops)
        if self.plans_file is not None and trainer.is_global_zero:
            keep_lines(self.plans_file, trainer.global_step)
        self._resume_receipt(trainer)
        self._resume_clock(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; what other callbacks do before an epoch is no time of a step."""
        self._resume_clock(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the clock; validation is no time of a step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._resume_clock(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At the first step of an epoch, note what the epoch holds."""
        self._need().begin_step(batch.epoch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step that has just been trained."""
        record: StepRecord = trainer.strategy.last_step  # type: ignore[attr-defined]
        now = time.perf_counter()
        metrics = self._need().of(record, now - self._last_end, Limits.of(trainer))
        self._last_end = now
        self._remember(record, metrics)
        self._log(trainer, {"loss": record.loss, **metrics})
        self._explain(trainer, record)
        if self.plans_file is not None and trainer.is_global_zero:
            append(self.plans_file, record.plan)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the receipt of the epoch."""
        ledger = self._need().ledger
        if ledger is not None:
            refused = len(trainer.strategy.loader.refused_ids)  # type: ignore[attr-defined]
            self.receipts.append(ledger.receipt(refused, Path(trainer.default_root_dir) / LEFT_OUT_FILE))
            rank_zero_info(str(self.receipts[-1]))

    # --- what users may ask -------------------------------------------------------------------------------------

    def timeline(self, index: int = -1) -> list[tuple[Span, ...]]:
        """Measured spans of all ranks for one kept step, in rank order; called by all ranks, outside of a step.

        Args:
            index: position in :attr:`records`.
        """
        mine = self.records[index].spans
        distributed = dist.is_available() and dist.is_initialized()
        return of_all_ranks(mine, dist.get_world_size() if distributed else 1)

    def waterfall(self) -> dict[str, float]:
        """Where the time of all ranks went since the fit started: shares of ``W`` times wall-clock, together 1.

        The same on every rank but for clock noise; nothing is communicated. ``report.plot_waterfall`` draws it.
        """
        return (self._measures.waterfall if self._measures is not None else Waterfall()).shares()

    # --- inside -------------------------------------------------------------------------------------------------

    def _need(self) -> Measures:
        assert self._measures is not None
        return self._measures

    def _resume_clock(self, trainer: pl.Trainer) -> None:
        trainer.strategy.clock.resume()  # type: ignore[attr-defined]
        self._last_end = time.perf_counter()

    def _resume_receipt(self, trainer: pl.Trainer) -> None:
        """Say what was trained before, where something was."""
        loader = trainer.strategy.loader  # type: ignore[attr-defined]
        if loader.consumed_samples == 0:
            return
        file = Path(trainer.default_root_dir) / LEFT_OUT_FILE
        receipt = open_ledger(loader).receipt(len(loader.refused_ids), file)
        self.receipts.append(receipt)
        rank_zero_info(resume_line(receipt, loader.consumed_samples, loader.consumed_tokens))

    def _explain(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Once per fit, the reason for a large gap; found on every rank, so that none waits for another's search."""
        found = self._gaps.add(record.plan)
        if found is not None:
            mean, worst = found
            cause = trainer.strategy.explain_gap(worst)  # type: ignore[attr-defined]
            rank_zero_warn(
                f"The steps take {mean:.1%} longer than their lower bound, on average over the last 20. In the worst "
                f"of them: {cause}"
            )

    def _remember(self, record: StepRecord, metrics: dict[str, float]) -> None:
        self.records.append(record)
        self.metrics.append(metrics)
        del self.records[: -self.keep_records], self.metrics[: -self.keep_records]

    def _log(self, trainer: pl.Trainer, values: dict[str, float]) -> None:
        """Log under the prefix, and the loss also without it, unless user code logs a value of that name."""
        if not self._steps_aside and logged_by_user(trainer, "loss"):
            self._steps_aside = True
            forget_of_step(trainer, "loss")
            rank_zero_warn(
                "A value named 'loss' is logged by the LightningModule or a callback, so 'loss' is that one; the exact "
                f"mean loss of each step over all ranks is logged as '{PREFIX}loss'"
            )
        shown = {f"{PREFIX}{key}": value for key, value in values.items() if math.isfinite(value)}
        bar = {f"{PREFIX}{key}" for key in self.prog_bar}
        if not self._steps_aside:
            shown = {"loss": values["loss"], **shown}
            bar = {"loss" if key == f"{PREFIX}loss" else key for key in bar}
        log_of_step(trainer, shown, bar)
