"""A run that is stopped after any step and resumed ends with the same bits, and no sample is lost or repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import Pool, RemoteError
from tests.resuming import CASE, EPOCHS, STEPS, Momentum, run


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


def test_another_number_of_ranks_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19585: a sentence on every rank, until checkpoints can be divided anew."""
    pool.run(run, 2, str(tmp_path), timeout=120.0)
    with pytest.raises(RemoteError) as caught:
        pool.run(run, 3, str(tmp_path / "more"), resume=str(tmp_path / "step=2.ckpt"), devices=3, timeout=120.0)
    assert sorted(caught.value.tracebacks) == [0, 1, 2]
    for text in caught.value.tracebacks.values():
        assert "was written by 2 ranks and cannot be resumed on 3" in text


@pytest.mark.launch
@pytest.mark.timeout(400)
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
    from tests.fitting import Data, make_trainer

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
