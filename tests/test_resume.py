"""A run that is stopped after any step and resumed ends with the same bits, and no sample is lost or repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.fitting import Data, make_strategy, make_trainer
from tests.pool import Pool
from tests.resuming import CASE, EPOCHS, STEPS, Momentum, Trace, fingerprint, run


@pytest.mark.feature(
    "Checkpoints", "resume within an epoch", "bit-equal on the same number of ranks, with workers too"
)
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_after_any_step_is_bit_equal(pool: Pool, tmp_path: Path, workers: int) -> None:
    """Sources of the faults: Lightning-AI/pytorch-lightning#20550, #11029; lhotse-speech/lhotse#417;
    verl-project/verl#7401; meta-pytorch/data#1439.
    """
    whole = pool.run(run, 2, str(tmp_path / "whole"), workers=workers, timeout=120.0)
    assert whole[0][0] == whole[1][0], "ranks differ"
    steps = whole[0][1]
    assert len(steps) == STEPS
    for epoch in range(EPOCHS):
        seen = [i for step in steps[4 * epoch : 4 * epoch + 4] for i in step]
        assert sorted(seen) == list(range(CASE.samples)), "each sample once an epoch"
    assert steps[:4] != steps[4:], "the order changes between epochs"
    chosen = range(1, STEPS) if workers == 0 else (3, 4)
    for step in chosen:
        checkpoint = str(tmp_path / "whole" / f"step={step}.ckpt")
        resumed = pool.run(run, 2, str(tmp_path / "again"), workers=workers, resume=checkpoint, timeout=120.0)
        assert resumed[0][1] == steps[step:], f"resumed after step {step}"
        assert resumed[0][0] == resumed[1][0] == whole[0][0], f"resumed after step {step}"


@pytest.mark.parametrize(
    "limit", [{"max_epochs": 3}, {"max_steps": 12, "max_epochs": -1}], ids=["epochs", "steps"]
)
def test_a_resumed_run_can_be_resumed(pool: Pool, tmp_path: Path, limit: dict[str, int]) -> None:
    """Behind the last batch of an epoch Lightning forgets to count the next one, so its files had the wrong epoch."""
    whole = pool.run(_fit_saving, 1, None, None, limit, timeout=60.0)[0]
    pool.run(_fit_saving, 1, tmp_path, None, {"max_steps": 4, "max_epochs": -1}, timeout=60.0)
    first = tmp_path / "4 on_train_batch_end.ckpt"
    again = tmp_path / "again"
    assert pool.run(_fit_saving, 1, again, first, limit, timeout=60.0)[0] == (whole[0], whole[1][4:], *whole[2:])
    for step in (6, 8):
        for file in again.glob(f"{step} *.ckpt"):
            resumed = pool.run(_fit_saving, 1, None, file, limit, timeout=60.0)[0]
            assert resumed == (whole[0], whole[1][step:], *whole[2:]), file.name


def _resume_and_listen(folder: str, checkpoint: str, devices: int) -> tuple[Any, int, str]:
    """Result, how often the model was measured, and warnings of the profile."""
    from lightning_dcp.profiling import measure, obtain

    measured: list[int] = []

    def measuring(*args: Any) -> Any:
        measured.append(1)
        return measure(*args)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(obtain, "measure", measuring)
        result = run(folder, resume=checkpoint, devices=devices)
    return (
        result,
        len(measured),
        "\n".join(str(w.message) for w in caught if "checkpoint's profile" in str(w.message)),
    )


def test_the_profile_is_used_again_where_it_fits(pool: Pool, tmp_path: Path) -> None:
    """meta-pytorch/torchft#292: on other ranks or hardware a new one is made, and the samples to come are the same."""
    whole = pool.run(run, 2, str(tmp_path), timeout=120.0)[0]
    checkpoint, elsewhere = tmp_path / "step=3.ckpt", tmp_path / "elsewhere.ckpt"
    again, measured, warned = pool.run(
        _resume_and_listen, 2, str(tmp_path / "a"), str(checkpoint), 2, timeout=120.0
    )[0]
    assert (again[0], again[1], measured, warned) == (whole[0], whole[1][3:], 0, "")
    content = torch.load(checkpoint, weights_only=True)
    profile = json.loads(content["lightning_dcp"]["profile"])
    profile["identity"]["device"] = "another"
    content["lightning_dcp"]["profile"] = json.dumps(profile)
    torch.save(content, elsewhere)
    for ranks, file, reason in ((2, elsewhere, "device: another / "), (3, checkpoint, "world_size: 2 / 3")):
        resumed, measured, warned = pool.run(
            _resume_and_listen, ranks, str(tmp_path / "b"), str(file), ranks, timeout=120.0
        )[0]
        assert resumed[1] == whole[1][3:]
        assert measured == 1
        assert reason in warned


PLACES = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")


class Everywhere(pl.Callback):
    """Saves wherever a callback may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, place: str, trainer: pl.Trainer) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step} {place}.ckpt")


for _place in PLACES:
    setattr(Everywhere, _place, lambda self, trainer, *args, place=_place: self.save(place, trainer))


class Validated(Momentum):
    def validation_step(self, *args: Any) -> None:
        pass


class ValidatedData(Data):
    def val_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0), batch_size=2)  # type: ignore[arg-type]


def _fit_saving(folder: Path | None, resume: Path | None, limits: dict[str, int]) -> Any:
    module, trace = Validated(CASE), Trace()
    trainer = make_trainer(
        make_strategy(CASE),
        CASE,
        devices=1,
        callbacks=[trace, *([Everywhere(folder)] if folder is not None else [])],
        **{"max_steps": -1, "num_sanity_val_steps": 0, **limits},
    )
    trainer.fit(module, datamodule=ValidatedData(CASE), ckpt_path=resume)
    if folder is not None:
        trainer.save_checkpoint(folder / f"{trainer.global_step} after.ckpt")
    return fingerprint(module), trace.steps, trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.feature(
    "Checkpoints",
    "`trainer.save_checkpoint` from a callback's hook",
    "after a batch, a validation, an epoch, the fit",
)
@pytest.mark.feature("Trainer", "`max_epochs`, `max_steps`", "a fit that ends within an epoch goes on there")
@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 8, "max_epochs": -1}], ids=["epochs", "steps"])
def test_wherever_it_was_saved_the_rest_is_trained(pool: Pool, tmp_path: Path, limit: dict[str, int]) -> None:
    """huggingface/transformers#48569: saved from each hook. Lightning alone drops the rest of an epoch that max_steps
    ends, and cuts the epoch that follows a whole one.
    """
    whole = pool.run(_fit_saving, 1, None, None, limit, timeout=60.0)[0]
    pool.run(_fit_saving, 1, tmp_path, None, {"max_steps": 6, "max_epochs": -1}, timeout=60.0)
    files = [file for file in sorted(tmp_path.iterdir()) if int(file.name[0]) >= 4]
    assert {file.stem.split()[1] for file in files} == {*PLACES, "after"}
    for file in files:
        resumed = pool.run(_fit_saving, 1, None, file, limit, timeout=60.0)[0]
        assert resumed == (whole[0], whole[1][int(file.name[0]) :], *whole[2:]), file.name


@pytest.mark.launch
@pytest.mark.timeout(400)
@pytest.mark.feature("Launchers", "Lightning's own launcher")
@pytest.mark.parametrize("step", [2])
def test_sigkill_and_resume_end_with_the_same_bits(tmp_path: Path, step: int) -> None:
    """Real processes, Lightning's own launcher, worker processes; killed in the middle of an epoch."""
    killed = _launch(tmp_path / "run", str(step), "-")
    assert killed.returncode == -signal.SIGKILL
    checkpoint = tmp_path / "run" / f"step={step}.ckpt"
    resumed = _launch(tmp_path / "run", "-", str(checkpoint))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    # The uninterrupted run resumes from the same profile, so that the plans are those of the first process.
    whole = _launch(tmp_path / "whole", "-", str(tmp_path / "run" / "step=1.ckpt"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert (tmp_path / "run" / "result").read_text() == (tmp_path / "whole" / "result").read_text()


def _launch(folder: Path, kill: str, resume: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.resuming", str(folder), kill, resume]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )


def _resumed_throughput(folder: str) -> list[float]:
    from lightning_dcp.callback import DCPCallback
    from lightning_dcp.strategy import DCPStrategy

    callback = DCPCallback()
    trainer = make_trainer(
        DCPStrategy(memory_limit="40MB", self_check=False, length_groups=2),
        CASE,
        devices=2,
        max_epochs=EPOCHS,
        callbacks=[callback],
    )
    trainer.fit(Momentum(CASE), datamodule=Data(CASE), ckpt_path=folder)
    return [metrics["tokens_per_second"] for metrics in callback.metrics]


def test_throughput_of_the_first_step_after_resuming(pool: Pool, tmp_path: Path) -> None:
    """A clock that was never started gave a thousandth of a token per second."""
    pool.run(run, 2, str(tmp_path), timeout=120.0)
    rates = pool.run(_resumed_throughput, 2, str(tmp_path / "step=2.ckpt"), timeout=120.0)[0]
    assert len(rates) == STEPS - 2
    assert rates[0] > max(rates) / 1000
