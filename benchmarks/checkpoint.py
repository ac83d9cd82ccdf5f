"""What saving and resuming a checkpoint costs: seconds and memory on each rank, by the number of parameters.

::

    python -m benchmarks.checkpoint --parameters 100 --ranks 2 --precision bf16-mixed

Prints the table of the documentation, and keeps it with all numbers in ``results/checkpoint.json``, one entry for each
number of ranks. Memory is the peak of a rank's resident memory above what it had before; pages of the mapped
file are counted apart, as the system takes them back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_dcp import DCPDataModule, DCPStrategy

WIDTH = 1024
RESULTS = Path(__file__).parent / "results"


class Wide(pl.LightningModule):
    """Layers of about a million parameters, as many as are asked for."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(millions)])

    def training_step(self, batch: dict[str, Any]) -> Any:
        """Mean square of the last layer's output."""
        weight = next(self.parameters())
        x_BSC = weight.new_ones(*batch["input_ids"].shape, WIDTH)
        for layer in self.layers:
            x_BSC = x_BSC + 0.01 * layer(x_BSC)
        return x_BSC.float().square().mean()

    def configure_optimizers(self) -> Any:
        """Two kinds of state for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Few(DCPDataModule):
    """Eight samples of a few tokens."""

    def setup(self, stage: str | None = None) -> None:  # noqa: ARG002 - Lightning's signature
        """Make the samples."""
        self.train_dataset = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(8)]


def memory(field: str) -> int:
    """A field of this process's memory, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def watched(name: str, found: dict[str, float]) -> Iterator[None]:
    """Seconds, and bytes of the peak above the start."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory("VmRSS"), time.perf_counter()
    yield
    found[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
    found[f"{name}_bytes"] = memory("VmHWM") - before
    found[f"{name}_file_pages"] = memory("RssFile")


class Measure(pl.Callback):
    """Takes the parts of a save apart at the end of the fit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Measure gathering, writing and the whole save."""
        strategy = trainer.strategy
        with watched("weights", self.found):
            weights = strategy.lightning_module_state_dict()
        with watched("optimizer", self.found):
            states = strategy.optimizer_state(trainer.optimizers[0])
        with watched("write", self.found):
            if trainer.is_global_zero:
                strategy.checkpoint_io.save_checkpoint({"w": weights, "o": states}, self.path)
        del weights, states
        with watched("save", self.found):
            trainer.save_checkpoint(self.path)


def trainer(arguments: argparse.Namespace, *callbacks: pl.Callback, steps: int) -> pl.Trainer:
    """A trainer that writes nothing by itself."""
    return pl.Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        precision=arguments.precision,
        strategy=DCPStrategy(self_check=False, planner="static", sp_sizes=[1]),
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def facts() -> dict[str, Any]:
    """When and where, for a kept result."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(result: dict[str, Any]) -> str:
    """The Markdown of the documentation: bytes per parameter, and rates in GB/s."""
    head, everyone, parameters = result["settings"], result["ranks_found"], result["parameters"]
    first = everyone[0]
    others = max((max(_held(found), 0) for found in everyone[1:]), default=0)
    gathered = first["weights_seconds"] + first["optimizer_seconds"]
    rows = [
        (f"{head['precision']}, {head['ranks']} ranks, {parameters / 1e6:.0f} million parameters", ""),
        ("---", "---"),
        ("file, bytes per parameter", f"{result['file_bytes'] / parameters:.1f}"),
        ("rank 0 while it saves, bytes per parameter", f"{_held(first) / parameters:.1f}"),
        ("other ranks, bytes per parameter", f"{others / parameters:.1f}"),
        ("gathering, GB/s", f"{result['file_bytes'] / gathered / 1e9:.2f}"),
        ("writing, GB/s", f"{result['file_bytes'] / first['write_seconds'] / 1e9:.2f}"),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def _held(found: dict[str, Any]) -> int:
    """Bytes that a rank gathers: weights and optimizer state, which are both there when the file is written."""
    return int(found["weights_bytes"] + found["optimizer_bytes"])


def keep(result: dict[str, Any]) -> None:
    """Put a result in the place of the one of the same number of ranks."""
    path = RESULTS / "checkpoint.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    ranks = result["settings"]["ranks"]
    others = [other for other in kept if other["settings"]["ranks"] != ranks]
    path.write_text(json.dumps(sorted([*others, result], key=lambda r: r["settings"]["ranks"]), indent=1) + "\n")


def main() -> None:
    """Save once, resume once, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is written")
    arguments = parser.parse_args()
    path = Path(arguments.folder, "lightning_dcp_benchmark.ckpt")
    measure = Measure(path)
    trainer(arguments, measure, steps=2).fit(Wide(arguments.parameters), datamodule=Few(global_batch_size=4))
    resumed = trainer(arguments, steps=2)
    with watched("resume", measure.found):
        resumed.fit(Wide(arguments.parameters), datamodule=Few(global_batch_size=4), ckpt_path=path)
    everyone: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(everyone, measure.found)
    if resumed.is_global_zero:
        parameters = sum(p.numel() for p in Wide(arguments.parameters).parameters())
        settings = {"precision": arguments.precision, "ranks": arguments.ranks}
        size = {"parameters": parameters, "file_bytes": path.stat().st_size}
        path.unlink()
        result = {**facts(), "settings": settings, **size, "ranks_found": everyone}
        print(table(result))
        keep(result)


if __name__ == "__main__":
    main()
