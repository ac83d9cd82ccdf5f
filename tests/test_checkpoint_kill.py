"""What is on disk after a process is killed, and what a save that not all ranks enter does."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpointing import CASE, Rich, Run, keeper, read, sample_ids, train
from tests.pool import Pool, RemoteError

BIG = 2_000_000
"""Elements that make the file take a moment to write."""


class Big(Rich):
    """So large that a kill meets the file half written."""

    def __init__(self, case: Any) -> None:
        super().__init__(case)
        self.register_buffer("ballast", torch.arange(float(BIG)))


class KillSaving(pl.Callback):
    """SIGKILL to one rank while the checkpoint of a step is being written by rank 0.

    Args:
        rank: who dies.
        step: of the checkpoint.
        moment: ``"writing"`` when bytes of the file are on disk, ``"before"`` when the rank enters the save.
    """

    def __init__(self, rank: int, step: int, moment: str) -> None:
        self.rank, self.step, self.moment = rank, step, moment

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank:
            return
        if self.moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        callback = trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        folder = Path(str(callback.dirpath))
        threading.Thread(target=self._watch, args=(folder,), daemon=True).start()

    def _watch(self, folder: Path) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for part in folder.glob(".*.part"):
                if part.stat().st_size > 0:
                    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_saving_leaves_the_last_checkpoint_whole(pool: Pool, tmp_path: Path) -> None:
    """One file that each step replaces: the one of the step before the kill is whole, and resumes to the same end."""
    run = Run(case=CASE, module=Big)
    whole = pool.run(train, 2, run, timeout=120.0)[0]
    for rank, moment in ((0, "writing"), (1, "before")):
        folder = tmp_path / f"{rank}-{moment}"
        saver = keeper(folder, filename="only", save_top_k=1, enable_version_counter=False)
        saving = replace(run, callbacks=(saver,), trainer={"enable_checkpointing": True})
        callbacks = (KillSaving(rank, 3, moment), saver)
        # A short limit for the one that is left, so that the test does not wait for it.
        killed = replace(saving, callbacks=callbacks, strategy={"timeout": timedelta(seconds=5)})
        with pytest.raises(RemoteError, match="the worker died"):
            pool.run(train, 2, killed, timeout=120.0)
        path = folder / "only.ckpt"
        content = read(path)
        assert content["global_step"] == 2
        assert torch.equal(content["state_dict"]["ballast"], torch.arange(float(BIG)))
        left = [file.name for file in folder.iterdir() if file != path]
        assert len(left) == (moment == "writing")
        assert all(name.startswith(".only.ckpt.") and name.endswith(".part") for name in left)
        ended = pool.run(train, 2, replace(saving, resume=str(path)), timeout=120.0)[0]
        assert sample_ids(ended.plans) == sample_ids(whole.plans)[2:]
        assert all(torch.equal(ended.weights[name], value) for name, value in whole.weights.items())
        assert [file.name for file in folder.iterdir()] == ["only.ckpt"], "the next save clears up"


class Lonely(pl.Callback):
    """Saves on one rank only, as code that was written for one process does."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank, self.path = rank, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            trainer.save_checkpoint(self.path, weights_only=True)


@pytest.mark.feature(
    "Checkpoints",
    "`save_checkpoint` on one rank only",
    "refused after `DCPStrategy(timeout=...)`: every rank has to call it",
)
def test_saving_on_one_rank_only_is_said(pool: Pool, tmp_path: Path) -> None:
    """huggingface/transformers#48569: a sentence instead of a hang, and no file; also where nothing is gathered."""
    path = str(tmp_path / "x.ckpt")
    run = Run(callbacks=(Lonely(0, path),), strategy={"timeout": timedelta(seconds=3)})
    with pytest.raises(RemoteError) as caught:
        pool.run(train, 2, run, timeout=60.0)
    assert "saving a checkpoint waited 3 s for ranks [1], only ranks [0] called it" in caught.value.tracebacks[0]
    assert not Path(path).exists()


class SaveInside(Rich):
    """Saves inside of a micro-batch."""

    path = ""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.trainer.global_step == 1:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def _error_of(run: Run) -> str:
    SaveInside.path = run.save or ""
    try:
        train(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.feature("Checkpoints", "`save_checkpoint` inside `training_step`", "refused")
def test_saving_inside_a_micro_batch_is_refused(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(_error_of, 2, Run(module=SaveInside, save=str(tmp_path / "x.ckpt")), timeout=60.0):
        assert "trainer.save_checkpoint was called inside training_step" in text
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_said_by_every_rank(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.mkdir()
    answers = pool.run(_error_of, 2, Run(save=str(path), steps=1), timeout=60.0)
    assert answers[0].startswith("IsADirectoryError")
    assert "rank 0: writing" in answers[1]
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"], "no half-written file is left"
