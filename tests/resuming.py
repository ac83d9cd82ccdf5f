"""A run that saves after every step, for tests that stop and resume it; also a program of its own (see main)."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.fitting import Case, Data, Module, make_trainer

CASE = Case(world_size=2, samples=22, batch=6, steps=-1, dropout=0.1, seed=5, masked="none", lr=0.05)
EPOCHS = 2
STEPS = 8


class Momentum(Module):
    """With momentum, so that the optimizer's state matters, and a schedule per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class Kill(pl.Callback):
    """SIGKILL to this process after a step, as the kernel or a scheduler would do."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        # At the start of the next step: the checkpoint of this one is complete.
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Trace(pl.Callback):
    """Sample ids of the steps that were trained."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        self.steps.append(sorted(i for m in plan.micro_batches for i in m.sample_ids))


def fingerprint(module: torch.nn.Module) -> str:
    """Hash of all weights to the last bit."""
    state = hashlib.sha256()
    for name, p in sorted(module.named_parameters()):
        state.update(name.encode())
        state.update(p.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def run(
    folder: str, *, workers: int = 0, resume: str | None = None, kill: int | None = None, devices: int = 2
) -> tuple[str, list[list[int]]]:
    """Train :data:`CASE` to its end; the planner, the profile and its file-less measuring are the real ones.

    Returns:
        Fingerprint of the final weights, and the samples of the trained steps.
    """
    from lightning_dcp.strategy import DCPStrategy

    trace = Trace()
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = Momentum(CASE)
    trainer = make_trainer(
        DCPStrategy(memory_limit="40MB", self_check=False, length_groups=2),
        CASE,
        devices=devices,
        max_epochs=EPOCHS,
        callbacks=[saver, trace, *([Kill(kill)] if kill is not None else [])],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    trainer.fit(module, datamodule=Data(CASE, num_workers=workers), ckpt_path=resume)
    return fingerprint(module), trace.steps


def main() -> None:
    """``python -m tests.resuming FOLDER KILL_STEP|- RESUME|-``: rank 0 writes the fingerprint to FOLDER/result."""
    folder, kill, resume = sys.argv[1:]
    result, _ = run(
        folder, workers=2, kill=None if kill == "-" else int(kill), resume=None if resume == "-" else resume
    )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(folder, "result").write_text(result)


if __name__ == "__main__":
    main()
