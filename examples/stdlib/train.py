"""Train the byte model on the standard library and report how the steps were planned.

python examples/stdlib/train.py fit --config examples/stdlib/config.yaml
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data import StandardLibrary
from lightning.pytorch.cli import LightningCLI
from model import ByteModel
from torch.nn import functional as F

from lightning_dcp import DCPCallback
from lightning_dcp.report import StepReport, most_varied, plot_timeline, plot_waterfall, summary_table


class ClosingReport(L.Callback):
    """Held-out loss before and after, a table of the run, pictures of one step and of where the time went.

    Args:
        dcp: keeps the records of the steps.

    Attributes:
        text: the table, once training has ended.
    """

    def __init__(self, dcp: DCPCallback) -> None:
        self.dcp = dcp
        self.text = ""
        self._loss_before = math.nan

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the loss of the untrained model."""
        self._loss_before = held_out_loss(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the loss again and write the report; all ranks take part, rank 0 writes."""
        dcp = self.dcp
        if not dcp.records:
            return
        loss_after = held_out_loss(trainer, pl_module)
        plans = [record.plan for record in dcp.records]
        shown = most_varied(plans)
        spans = dcp.timeline(shown)
        if not trainer.is_global_zero:
            return
        steps = [
            StepReport(
                plan=record.plan,
                seconds=metrics["seconds"],
                idle=record.idle_ratio,
            )
            for record, metrics in zip(dcp.records, dcp.metrics, strict=True)
        ]
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        plot_timeline(plans[shown], spans, folder / "step.png")
        waterfall = dcp.waterfall()
        plot_waterfall(waterfall, folder / "waterfall.png")
        self.text = summary_table(steps, loss_before=self._loss_before, loss_after=loss_after, waterfall=waterfall)
        (folder / "summary.txt").write_text(self.text + "\n")


@torch.no_grad()
def held_out_loss(trainer: L.Trainer, module: L.LightningModule) -> float:
    """Mean loss of a held-out byte; the same on every rank, each of which measures it all."""
    total, count = 0.0, 0
    for sample in trainer.datamodule.held_out:  # type: ignore[attr-defined]
        tokens_BS = torch.tensor([list(sample)], device=module.device)
        positions_BS = torch.arange(len(sample), device=module.device)[None]
        logits_BSV = module(tokens_BS, positions_BS)
        total += float(F.cross_entropy(logits_BSV[0, :-1].float(), tokens_BS[0, 1:], reduction="sum"))
        count += len(sample) - 1
    return total / max(count, 1)


class ReportingCLI(LightningCLI):
    """LightningCLI that prints the report below everything else."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Put the report before the configured callbacks: what it does at the start belongs to no step."""
        trainer = super().instantiate_trainer(**kwargs)
        dcp = DCPCallback()
        self.report = ClosingReport(dcp)
        trainer.callbacks[:0] = [self.report, dcp]  # type: ignore[attr-defined]
        return trainer

    def after_fit(self) -> None:
        """Print what rank 0 has written."""
        if self.report.text:
            print(f"\n{self.report.text}\n\nwritten to {self.trainer.default_root_dir}:")
            print("step.png, waterfall.png, summary.txt, metrics.csv, config.yaml and the checkpoints")


def main() -> None:
    """Run the command line."""
    ReportingCLI(ByteModel, StandardLibrary, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
