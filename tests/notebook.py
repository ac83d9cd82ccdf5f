"""Cells of a notebook, for ``python -i -c``: two processes by fork, then one, in one interactive session."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Data, Module, Samples, collate_whole, make_strategy, make_trainer, weights_of
from tests.launching import case_of


class Predicting(Module):
    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        with Path(self.folder, f"predicted{self.global_rank}").open("a") as file:
            file.write(f"{len(batch['input_ids'])}\n")
        return self.net(batch["input_ids"], batch["position_ids"], batch["kind"]).mean()

    folder = ""


class Plans(pl.Callback):
    """What happens in the forked processes is seen through files only."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            Path(self.folder, "plans.json").write_text(json.dumps(self.plans))


class Interrupted(pl.Callback):
    """Ctrl-C for the session, from a process that it forked; then steps that would go on for long."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            Path(self.folder, f"forked{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.is_global_zero and trainer.global_step >= 3:  # until it is heard
            os.kill(os.getppid(), signal.SIGINT)


def interrupted(folder: str) -> list[int]:
    """Process ids of the forked ranks that live on after the session was interrupted."""
    case = case_of(2, steps=1_000_000)
    trainer = make_trainer(
        make_strategy(case, start_method="fork"), case, devices=2, callbacks=[Interrupted(folder)]
    )
    try:
        trainer.fit(Module(case), datamodule=Data(case))
    except SystemExit:
        pids = [int(Path(folder, f"forked{rank}").read_text()) for rank in range(2)]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    raise AssertionError("the fit was not interrupted")


def refusal(**strategy: Any) -> str:
    try:
        pl.Trainer(strategy=DCPStrategy(**strategy), accelerator="cpu", devices=2, logger=False)
    except MisconfigurationException as error:
        return str(error)
    return ""


def run(folder: str) -> None:
    """All cells; what they show goes to a file."""
    shown: dict[str, Any] = {}

    shown["refusal"] = refusal()
    for name in ("dcp_notebook", "dcp_fork"):
        named = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
        shown[name] = type(named.launcher).__name__

    case = case_of(2)
    module, plans = Predicting(case), Plans(folder)
    module.folder = folder
    start = weights_of(module)
    best = ModelCheckpoint(dirpath=folder, monitor="loss", save_last=True)
    trainer = make_trainer(
        make_strategy(case, start_method="fork"),
        case,
        devices=2,
        callbacks=[plans, best],
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=Data(case))
    shown["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    shown["best"] = best.best_model_path
    shown["devices"] = sorted({str(p.device) for p in module.parameters()})
    torch.save((start, weights_of(module), plans.plans), Path(folder, "weights.pt"))
    try:
        trainer.fit(module, datamodule=Data(case))
    except NotImplementedError as error:
        shown["again"] = str(error)

    loader: Any = DataLoader(Samples(case), batch_size=4, collate_fn=collate_whole)
    shown["predictions"] = trainer.predict(module, loader)
    shown["left"] = interrupted(folder)
    # Last: no fork is allowed after it.
    alone = case_of(1)
    module = Predicting(alone)
    start = weights_of(module)
    make_trainer(make_strategy(alone), alone, devices=1).fit(module, datamodule=Data(alone))
    shown["alone"] = max(float((w - start[n]).abs().max()) for n, w in weights_of(module).items())
    shown["initialised"] = dist.is_initialized()
    again = make_trainer(make_strategy(case, start_method="fork"), case, devices=2)
    try:
        again.fit(Predicting(case), datamodule=Data(case))
    except MisconfigurationException as error:
        shown["late"] = str(error)
    Path(folder, "shown.json").write_text(json.dumps(shown))
