"""Lives of a job: killed at a moment of a step, resumed from its last file, perhaps on other ranks, until it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_dcp.agreement import Agreement
from lightning_dcp.checkpoint import files, temporary
from lightning_dcp.checkpoint.hooks import CheckpointedStrategy
from lightning_dcp.checkpoint.meeting import Meeting
from lightning_dcp.engine import ZeroEngine
from lightning_dcp.plan import IterationPlan
from tests.checkpointing import Rich, keeper
from tests.fitting import Case, Data, Samples, make_strategy, make_trainer, weights_of

OF_RANK_0 = ("half written", "before renaming", "renamed", "removing")
"""Moments of the writer; another rank dies while rank 0 is in it."""

MOMENTS = (
    "fetch", "start", "forward", "backward", "begin", "vote", "reduce", "optimizer", "stepped",
    "save", "meeting", "gather", *OF_RANK_0, "epoch end", "epoch start",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL to one rank.

    Attributes:
        rank: who dies.
        step: optimizer steps that are done when the step begins in which it dies.
        moment: one of :data:`MOMENTS`; a later step's where the moment does not come in this one.
        passes: how often the moment passes before.
        life: which start of the job it is.
    """

    rank: int
    step: int
    moment: str
    passes: int = 0
    life: int = 0


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one start of the job gets.

    Attributes:
        folder: of its checkpoints and of its log.
        case: model, data and ranks.
        planner: ``None`` for one of fixed steps.
        limit: argument of the Trainer that ends it.
        kill: how it dies before.
    """

    folder: Path
    case: Case
    limit: dict[str, int]
    planner: Any = None
    kill: Kill | None = None


class Death(pl.Callback):
    """Dies at a moment; stands before the callback that saves."""

    def __init__(self, kill: Kill, folder: Path) -> None:
        self.kill = kill
        self.left = kill.passes
        self.armed = False
        self.rank = -1
        self.flag = folder / f".now.{kill.life}"

    def due(self, moment: str) -> bool:
        """Whether this is the moment."""
        if self.armed and moment == self.kill.moment:
            self.left -= 1
        return self.left < 0

    def now(self, moment: str) -> None:
        """Die, if this is the moment on this rank."""
        if self.rank == self.kill.rank and self.due(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def writing(self, moment: str) -> None:
        """Rank 0 is at a moment of its own: it dies, or gives the other rank the time to."""
        if self.rank == self.kill.rank:
            self.now(moment)
        elif self.due(moment):
            self.flag.touch()
            time.sleep(0.1)

    def watch(self) -> None:
        """Die when rank 0 is at its moment."""
        while not self.flag.exists():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.rank = trainer.global_rank
        if self.rank == self.kill.rank != 0 and self.kill.moment in OF_RANK_0:
            threading.Thread(target=self.watch, daemon=True).start()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.armed = self.armed or trainer.global_step >= self.kill.step
        self.now("start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.now("stepped")

    def on_save_checkpoint(self, *args: Any) -> None:
        self.now("save")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.now("epoch end")

    def on_train_epoch_start(self, *args: Any) -> None:
        self.now("epoch start")


class Killable(Rich):
    """Says where it is in a step."""

    death: Death | None = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.death is not None and loss.requires_grad:
            self.tell("forward")
            loss.register_hook(lambda _: self.tell("backward"))
        return loss

    def tell(self, moment: str) -> None:
        if self.death is not None:
            self.death.now(moment)

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = super().optimizer(groups)
        optimizer.register_step_pre_hook(lambda *_: self.tell("optimizer"))
        return optimizer


class Log(pl.Callback):
    """Rank 0 writes down where the run stands and what each step trained, before the step is saved."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, trainer: pl.Trainer, **facts: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": trainer.global_step, **facts}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.write(trainer, started=trainer.world_size)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        self.write(trainer, epoch=trainer.current_epoch, plan=plan.to_json())


@contextmanager
def watched(death: Death) -> Iterator[None]:
    """Have everything that a step and a save go through tell where it is."""

    def before(patch: pytest.MonkeyPatch, place: Any, name: str, moment: str) -> None:
        original: Callable[..., Any] = getattr(place, name)

        def telling(*args: Any, **kwargs: Any) -> Any:
            death.now(moment)
            return original(*args, **kwargs)

        patch.setattr(place, name, telling)

    with pytest.MonkeyPatch.context() as patch:
        before(patch, Samples, "__getitem__", "fetch")
        before(patch, Agreement, "begin", "begin")
        before(patch, Agreement, "end", "vote")
        before(patch, ZeroEngine, "reduce", "reduce")
        before(patch, Meeting, "wait", "meeting")
        before(patch, torch.distributed, "gather", "gather")
        _watch_writing(death, patch)
        yield


def _watch_writing(death: Death, patch: pytest.MonkeyPatch) -> None:
    save, replace, remove = torch.save, os.replace, CheckpointedStrategy.remove_checkpoint

    def half(content: Any, part: Path) -> None:
        buffer = io.BytesIO()
        save(content, buffer)
        with part.open("wb") as file:
            file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
            file.flush()
            death.writing("half written")
            file.write(buffer.getvalue()[len(buffer.getvalue()) // 2 :])

    def replacing(part: Path, place: Path) -> None:
        death.writing("before renaming")
        replace(part, place)
        death.writing("renamed")

    def removing(self: Any, path: Any) -> None:
        if self.is_global_zero:
            death.writing("removing")
        remove(self, path)

    patch.setattr(files, "torch", _With(torch, save=half))
    patch.setattr(temporary, "os", _With(os, replace=replacing))
    patch.setattr(CheckpointedStrategy, "remove_checkpoint", removing)


class _With:
    """A module with some other functions."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def live(life: Life) -> dict[str, Tensor]:
    """Go on from the last checkpoint, if there is one, to the end; called by every rank of the pool.

    Returns:
        The weights at the end.
    """
    module = Killable(life.case)
    saver = keeper(life.folder, save_top_k=1, save_last=True)
    callbacks: list[pl.Callback] = [Log(life.folder / "log")]
    settings = {} if life.planner is None else {"planner": life.planner}
    if life.kill is not None:
        module.death = Death(life.kill, life.folder)
        callbacks.append(module.death)
    trainer = make_trainer(
        make_strategy(life.case, **settings),
        life.case,
        devices=life.case.world_size,
        callbacks=[*callbacks, saver],
        enable_checkpointing=True,
        **{"max_steps": -1, "max_epochs": -1, **life.limit},
    )

    with watched(module.death) if module.death is not None else nullcontext():
        trainer.fit(module, datamodule=Data(life.case), ckpt_path="last")
    return weights_of(module)


def trained(log: Path) -> list[tuple[int, IterationPlan]]:
    """Epoch and plan of each step that the job kept, from all its lives: what was behind a checkpoint was lost."""
    steps: list[tuple[int, IterationPlan]] = []
    for line in log.read_text().splitlines():
        fact = json.loads(line)
        if "started" in fact:
            assert fact["step"] <= len(steps), "a life began behind what was trained"
            del steps[fact["step"] :]
        else:
            assert fact["step"] == len(steps) + 1
            steps.append((fact["epoch"], IterationPlan.from_json(fact["plan"])))
    return steps
