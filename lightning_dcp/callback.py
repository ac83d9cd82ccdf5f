"""What a user sees of the plans: exact loss, throughput, idle and padding in the progress bar and the logger."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.metrics import GapWatch, step_metrics
from lightning_dcp.records import Span, StepRecord

PREFIX = "dcp/"


class DCPCallback(pl.Callback):
    """Logs every step's record; ``DCPStrategy`` adds one where none was given.

    The key ``loss`` is the exact mean of the step over all ranks; the other keys begin with ``dcp/``. Everything is
    known to every rank already, so nothing is communicated.

    Args:
        prog_bar: keys, without prefix, that the progress bar shows.
        plans_file: file that rank 0 writes one JSON line per step to; the plans can be trained again with
            ``DCPStrategy(planner=Replay(file))``. A new run begins it anew; a resumed one goes on behind the step of
            its checkpoint, as the later steps are planned again.
        keep_records: steps whose records are kept in memory for :meth:`timeline`, the latest ones.
    """

    def __init__(
        self,
        prog_bar: Sequence[str] = ("loss", "tokens_per_second", "idle_measured"),
        plans_file: str | Path | None = None,
        keep_records: int = 1024,
    ) -> None:
        self.prog_bar = tuple(prog_bar)
        self.plans_file = Path(plans_file) if plans_file is not None else None
        self.keep_records = keep_records
        self.records: list[StepRecord] = []
        self.metrics: list[dict[str, float]] = []
        self._last_end = 0.0
        self._gaps = GapWatch()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, since a run that resumes within an epoch starts none, and on rank 0 the file of plans."""
        self._resume_clock(trainer)
        self._gaps = GapWatch()
        if self.plans_file is not None and trainer.is_global_zero:
            self.plans_file.parent.mkdir(parents=True, exist_ok=True)
            _keep_lines(self.plans_file, trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; what other callbacks do before an epoch is no time of a step."""
        self._resume_clock(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the clock; validation is no time of a step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._resume_clock(trainer)

    def _resume_clock(self, trainer: pl.Trainer) -> None:
        trainer.strategy.clock.resume()  # type: ignore[attr-defined]
        self._last_end = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step that has just been trained."""
        record: StepRecord = trainer.strategy.last_step  # type: ignore[attr-defined]
        now = time.perf_counter()
        metrics = step_metrics(record, now - self._last_end)
        self._last_end = now
        self._remember(record, metrics)
        shown = {f"{PREFIX}{key}": value for key, value in metrics.items() if math.isfinite(value)}
        self._log(pl_module, {"loss": record.loss, **shown})
        self._explain(trainer, record)
        if self.plans_file is not None and trainer.is_global_zero:
            with self.plans_file.open("a", encoding="utf-8") as file:
                file.write(record.plan.to_json() + "\n")

    def timeline(self, index: int = -1) -> list[tuple[Span, ...]]:
        """Measured spans of all ranks for one kept step, in rank order; called by all ranks, outside of a step.

        Args:
            index: position in :attr:`records`.
        """
        mine = self.records[index].spans
        distributed = dist.is_available() and dist.is_initialized()
        return of_all_ranks(mine, dist.get_world_size() if distributed else 1)

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

    def _log(self, pl_module: pl.LightningModule, values: dict[str, float]) -> None:
        in_bar = {key: key.removeprefix(PREFIX) in self.prog_bar for key in values}
        for shown in (True, False):
            part = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items() if in_bar[k] is shown}
            if part:
                pl_module.log_dict(part, on_step=True, on_epoch=False, prog_bar=shown, batch_size=1)


def _keep_lines(file: Path, number: int) -> None:
    """Cut a file behind its first lines; the last of them may have been cut off by a kill, and is left out then."""
    if number and file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:number]
        kept = "".join(line for line in lines if line.endswith("\n"))
    else:
        kept = ""
    file.write_text(kept, encoding="utf-8")
