"""Files that are opened elsewhere: without DeepSpeed, from a command line, cut off, foreign, with other settings."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_dcp.callback import DCPCallback
from lightning_dcp.checkpoint import AtomicCheckpointIO, plan_settings
from lightning_dcp.execution import LossSettings
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import PlanRequest, Replay, Static
from lightning_dcp.preparation import Settings
from tests.checkpointing import (
    CASE,
    Configured,
    ConfiguredData,
    ConfiguredSingle,
    Ended,
    Rich,
    Run,
    read,
    resume_and_listen,
    sample_ids,
    tensors_of,
    train,
)
from tests.fitting import (
    LAYERS,
    Data,
    Result,
    assert_same_updates,
    fit_single,
    formula_profile,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool


def _command_line(folder: str) -> None:
    LightningCLI(
        Configured,
        ConfiguredData,
        args=[
            "fit",
            "--trainer.strategy.class_path=lightning_dcp.DCPStrategy",
            "--trainer.strategy.init_args.planner=static",
            "--trainer.strategy.init_args.self_check=false",
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            "--trainer.max_steps=2",
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--trainer.default_root_dir={folder}",
            "--model.lr=0.25",
            "--data.seed=4",
        ],
        save_config_callback=None,
    )


ELSEWHERE = """
import sys
sys.modules["deepspeed"] = None
from tests.checkpointing import Configured
module = Configured.load_from_checkpoint(sys.argv[1], weights_only=True)
other = Configured.load_from_checkpoint(sys.argv[1], lr=0.5)
print(module.hparams.lr, other.hparams.lr, float(module.net.heads[1].weight.double().sum()))
"""


@pytest.mark.feature(
    "Checkpoints",
    "`load_from_checkpoint`",
    "also on a machine without DeepSpeed, with other hyperparameters, with `weights_only=True`",
)
@pytest.mark.launch
def test_a_checkpoint_of_the_command_line_opens_without_deepspeed(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#15834, #20068: it holds values, and no live strategy or planner."""
    pool.run(_command_line, 1, str(tmp_path), timeout=120.0)
    (path,) = tmp_path.rglob("*.ckpt")
    content = read(path)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lr, other, total = map(float, done.stdout.split())
    assert (lr, other) == (0.25, 0.5)
    assert total == float(content["state_dict"]["net.heads.1.weight"].double().sum())


def _warm_start(path: str) -> Ended:
    class Loaded(Configured):
        def __new__(cls, *args: Any) -> Any:
            return Configured.load_from_checkpoint(path, lr=0.05)

    return train(Run(module=Loaded, steps=2))


@pytest.mark.feature("Checkpoints", "warm start from the weights alone")
def test_warm_start_with_other_hyperparameters(pool: Pool, tmp_path: Path) -> None:
    """Weights alone from a file of weights; a fit that wants all of the run from it is refused by Lightning."""
    path = str(tmp_path / "w.ckpt")
    pool.run(_save_weights, 2, path, timeout=60.0)
    assert "optimizer_states" not in read(path)
    ended = pool.run(_warm_start, 2, path, timeout=60.0)[0]

    def loaded(case: Any) -> Any:
        return ConfiguredSingle.load_from_checkpoint(path, lr=0.05)

    single = fit_single(replace(CASE, steps=2), ended.plans, make=loaded)
    start = weights_of(loaded(CASE))
    assert_same_updates(Result(start=start, weights=ended.weights, losses=[], plans=[]), single)
    assert pool.run(resume_and_listen, 1, Run(case=replace(CASE, world_size=1), resume=path), timeout=60.0)[0][
        0
    ].startswith("KeyError: 'Trying to restore optimizer state but checkpoint contains only the model")


def _save_weights(path: str) -> None:
    class Save(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.save_checkpoint(path, weights_only=True)

    class Made(Configured):
        def __init__(self, case: Any) -> None:
            super().__init__()

    train(Run(module=Made, steps=1, callbacks=(Save(),)))


class Draws(pl.Callback):
    """Draws from every global generator after each step, another number on each rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            pl.seed_everything(trainer.global_rank)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((float(torch.rand(())), float(np.random.normal()), random.random()))


def _draw(run: Run) -> list[tuple[float, float, float]]:
    draws = Draws()
    train(replace(run, callbacks=(*run.callbacks, draws)))
    return draws.seen


@pytest.mark.feature("Checkpoints", "global random numbers", "go on where the number of ranks is the same")
def test_random_numbers_go_on(pool: Pool, tmp_path: Path) -> None:
    """Of each rank, where the number of ranks is the same."""
    path = str(tmp_path / "3.ckpt")
    whole = pool.run(_draw, 2, Run(), timeout=60.0)
    assert whole[0] != whole[1]
    pool.run(_draw, 2, Run(steps=3, save=path), timeout=60.0)
    assert pool.run(_draw, 2, Run(resume=path), timeout=60.0) == [rank[3:] for rank in whole]
    assert len(pool.run(_draw, 1, Run(case=replace(CASE, world_size=1), resume=path), timeout=60.0)[0]) == 3


def test_the_file_of_plans_has_one_line_for_each_step(pool: Pool, tmp_path: Path) -> None:
    """Of a run that went on behind its last checkpoint before it was stopped; and it can be replayed."""
    path, file = str(tmp_path / "2.ckpt"), tmp_path / "plans.jsonl"
    pool.run(train, 2, Run(steps=2, save=path, callbacks=(DCPCallback(plans_file=file),)), timeout=60.0)
    earlier = file.read_text()
    ended = pool.run(train, 2, Run(steps=4, resume=path, callbacks=(DCPCallback(plans_file=file),)), timeout=60.0)
    with file.open("a") as cut_off:
        cut_off.write('{"cut')
    second = {"planner": Static(batch_size=2)}
    run = Run(steps=6, resume=path, callbacks=(DCPCallback(plans_file=file),), strategy=second)
    again = pool.run(train, 2, run, timeout=60.0)
    assert ended[0].plans != again[0].plans[:2]
    assert file.read_text() == earlier + "".join(f"{plan}\n" for plan in again[0].plans)
    assert len(earlier.splitlines()) == 2
    Replay(file)


def test_changed_settings_are_named(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#20310: the run goes on with its own settings, and says which differ."""
    path = str(tmp_path / "2.ckpt")
    first = {"planner": Static(batch_size=2), "max_step_factor": 4.0}
    whole = pool.run(train, 2, Run(strategy=first), timeout=60.0)[0]
    pool.run(train, 2, Run(strategy=first, steps=2, save=path), timeout=60.0)
    same = pool.run(resume_and_listen, 2, Run(strategy=first, resume=path), timeout=60.0)[0]
    assert same == ("", sample_ids(whole.plans)[2:])
    other = replace(formula_profile(2, (LAYERS,)), static_bytes=7)
    second = {"planner": Static(batch_size=3), "max_step_factor": 2.0, "sp_sizes": [1], "profile": other}
    message, ids = pool.run(resume_and_listen, 2, Run(strategy=second, resume=path), timeout=60.0)[0]
    assert ids == same[1]
    changes = "planner.batch_size: 2 / 3; sp_sizes: None / [1]; max_step_factor: 4.0 / 2.0"
    assert message.endswith(f"Changed (checkpoint / now): {changes}; profile: of the checkpoint / given")


class Word(StrEnum):
    TOKEN = "token"


class Numbered:
    """A planner of one's own."""

    name, draws, lockstep = "numbered", False, False

    def __init__(self) -> None:
        self.sizes = [np.int64(3), np.bool_(True)]

    def plan(self, request: PlanRequest) -> IterationPlan:
        raise NotImplementedError


def test_settings_of_numpy_and_enumerations_are_kept_as_plain_values(tmp_path: Path) -> None:
    """A careful reader refuses a file with anything else; and a value must equal itself when it is read again."""
    settings = Settings(
        planner=Numbered(),
        sp_sizes=(1,),
        max_step_factor=np.float64(2),
        memory_limit=np.float64(0.8),
        layers=(np.str_("layers"),),
        loss=LossSettings(weighting=Word.TOKEN),  # type: ignore[arg-type]
    )
    torch.save(plan_settings(settings), tmp_path / "x.ckpt")
    again = read(tmp_path / "x.ckpt")
    assert again == plan_settings(settings)
    wanted = {"planner.sizes": [3, True], "max_step_factor": 2.0, "memory_limit": 0.8, "layers": ["layers"]}
    assert {name: again[name] for name in wanted} == wanted
    assert (type(again["loss_weighting"]), again["loss_weighting"]) == (str, "token")


def _evaluate_and_save(run: Run, path: str) -> None:
    """Save when a validation has followed the fit."""

    class Validated(Rich):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", dict(self.named_parameters())["net.heads.1.weight"].float().sum())

    module = Validated(run.case)
    trainer = make_trainer(make_strategy(run.case), run.case, devices=2, max_steps=run.steps)
    trainer.fit(module, datamodule=Data(run.case))
    trainer.validate(module, torch.utils.data.DataLoader(torch.arange(4.0), batch_size=1))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


@pytest.mark.feature(
    "Checkpoints", "`trainer.save_checkpoint` after a fit", "also after a validation that followed"
)
def test_saving_after_a_validation(pool: Pool, tmp_path: Path) -> None:
    """The masters, the optimizer's state and the position in the data of the fit are still known."""
    case = replace(CASE, precision="bf16-mixed")
    path, expected = str(tmp_path / "validated.ckpt"), str(tmp_path / "fitted.ckpt")
    pool.run(_evaluate_and_save, 2, Run(case=case, steps=2), path, timeout=60.0)
    pool.run(train, 2, Run(case=case, steps=2, save=expected), timeout=60.0)
    got, wanted = (
        tensors_of({k: read(p)[k] for k in ("state_dict", "optimizer_states")}) for p in (path, expected)
    )
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    _, ids = pool.run(resume_and_listen, 2, Run(case=case, steps=3, resume=path), timeout=60.0)[0]
    assert [len(step) for step in ids] == [4], "the short last step of the epoch"


def test_a_legacy_file_is_read(tmp_path: Path) -> None:
    """torch's format of before 1.6 cannot be mapped into memory."""
    path = tmp_path / "old.ckpt"
    torch.save({"x": torch.arange(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(path)["x"], torch.arange(3))
