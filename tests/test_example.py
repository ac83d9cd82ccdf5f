"""The example: its data, its model, the few lines that are about us, and one short run of the real command."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "stdlib"


def _load(path: Path) -> ModuleType:
    """Import a file that is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data() -> ModuleType:
    return _load(EXAMPLE / "data.py")


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return _load(EXAMPLE / "model.py")


def _lines() -> list[str]:
    return [
        line
        for name in ("model.py", "data.py", "config.yaml")
        for line in (EXAMPLE / name).read_text().split("\n")
    ]


def test_at_most_ten_lines_are_about_us() -> None:
    marked = [line for line in _lines() if line.endswith("# dcp")]
    assert 5 <= len(marked) <= 10


def test_no_line_about_us_is_left_unmarked() -> None:
    """Every name of the package stands in a marked line, and so does every use of what those lines import."""
    about_us = re.compile(r"\blightning_dcp\b|\bDCP\w+|\btrain_dataset\b|\bmemory_limit\b|\bshift_labels\b")
    unmarked = [line for line in _lines() if about_us.search(line) and not line.endswith("# dcp")]
    assert unmarked == []


def test_definitions_are_whole_and_in_order(data: ModuleType) -> None:
    source = (
        '"""é"""\nx = 1\n@a\n@b(\n    2)\ndef f():\n    def inner(): ...\n    return "é"\n\nclass C:\n    y = 1\n'
    )
    assert list(data.definitions(source)) == [
        '@a\n@b(\n    2)\ndef f():\n    def inner(): ...\n    return "é"\n'.encode(),
        b"class C:\n    y = 1\n",
    ]


def test_files_are_read_in_order_and_tests_are_left_out(data: ModuleType, tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"def {Path(name).stem}(): ...\n")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\ndef é(): ...\n".encode("latin-1"))
    names = [sample.decode().split("(")[0] for sample in data.standard_library(tmp_path)]
    assert names == ["def z", "def b", "def é"]


@pytest.fixture(scope="module")
def prepared(data: ModuleType) -> Any:
    module = data.StandardLibrary(max_bytes=4096, held_out_every=64)
    module.setup("fit")
    return module


def test_standard_library_has_a_long_tail(prepared: Any) -> None:
    lengths = sorted(prepared.train_dataset.lengths)
    assert len(lengths) > 3000
    assert lengths[len(lengths) // 2] < 1000
    assert lengths[-1] == 4096


def test_held_out_samples_are_not_trained(
    data: ModuleType, prepared: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [sample[:4096] for sample in data.standard_library()]
    trained = prepared.train_dataset.samples
    assert prepared.held_out == whole[::64]
    assert len(trained) + len(prepared.held_out) == len(whole)
    assert trained[:63] == whole[1:64]
    assert trained[63] == whole[65]


def test_share_that_is_cut_is_said(data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(data, "standard_library", lambda: [b"a" * 30, b"b" * 10, b"c" * 8, b"d" * 2])
    monkeypatch.setattr(data, "rank_zero_info", said.append)
    module = data.StandardLibrary(max_bytes=10, held_out_every=2)
    module.setup("fit")
    assert said == [
        "4 functions and classes of the standard library; 25.0% of them were cut at 10 bytes, "
        "40.0% of all bytes with it"
    ]
    assert module.held_out == [b"a" * 10, b"c" * 8]
    sample = module.train_dataset[1]["input_ids"]
    assert sample.dtype == torch.int64
    assert sample.tolist() == [100, 100]


def test_model_has_half_a_million_parameters_and_learns(model: ModuleType) -> None:
    torch.manual_seed(0)
    module = model.ByteModel(learning_rate=3e-3)
    assert abs(sum(p.numel() for p in module.parameters()) / 5e5 - 1) < 0.05
    text = torch.tensor([list(b"def f(x):\n    return x\n" * 3)])
    labels = torch.cat([text[:, 1:], torch.tensor([[-100]])], dim=1)
    batch = {"input_ids": text, "labels": labels, "position_ids": torch.arange(text.shape[1])[None]}
    settings = module.configure_optimizers()
    optimizer, schedule = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    losses = []
    for _ in range(30):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(5.545, abs=0.3)  # ln 256: nothing is known yet
    assert losses[-1] < 0.6 * losses[0]


def test_learning_rate_rises_then_falls(model: ModuleType) -> None:
    schedule = model.ByteModel(learning_rate=1.0, warmup_steps=4).configure_optimizers()["lr_scheduler"][
        "scheduler"
    ]
    rates = []
    for _ in range(17):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[15] == pytest.approx(0.5)


@pytest.mark.launch
def test_command_trains_and_reports(tmp_path: Path) -> None:
    """The command of ``make train`` in small: two processes, three steps."""
    settings = [
        "--trainer.max_steps=3",
        f"--trainer.default_root_dir={tmp_path}",
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        "--data.global_batch_size=16",
        "--data.max_bytes=256",
        "--data.held_out_every=300",
        "--trainer.strategy.init_args.memory_limit=0.5",
        f"--trainer.callbacks.init_args.dirpath={tmp_path}",
        "--trainer.callbacks.init_args.every_n_train_steps=3",
    ]
    command = [
        sys.executable,
        "examples/stdlib/train.py",
        "fit",
        "--config=examples/stdlib/config.yaml",
        *settings,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "functions and classes of the standard library" in done.stdout + done.stderr
    summary = (tmp_path / "summary.txt").read_text()
    assert summary in done.stdout
    assert re.search(r"^steps +3 in", summary, re.MULTILINE)
    losses = re.search(r"held-out loss +([\d.]+) before, ([\d.]+) after", summary)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    for picture in ("step.png", "waterfall.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^time of all ranks +[\d.]+% useful", summary, re.MULTILINE)
    assert "samples trained exactly once" in done.stdout + done.stderr
    assert (tmp_path / "last.ckpt").exists()
    with (tmp_path / "stdlib" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
