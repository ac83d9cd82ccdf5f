"""What saving adds to the time of the main example: a checkpoint every 50 steps and one at the end.

python -m benchmarks.saving [--steps 60] [--quick]

The example's own command runs, two CPU processes, with its own ``ModelCheckpoint`` (which writes two files each time,
as ``save_last`` is on) and one more save at the end. Seconds of saving are those that all ranks wait, on rank 0, from
the call to its return; they are divided by the seconds from the first step's start to the last save's end. So what
else the machine does falls on both. About 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.checkpoint import facts

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GOAL = 0.05
"""Most that saving may add to the time without it."""


class SaveClock(L.Callback):
    """Times every save, saves at the end too, and writes what it found; made by the example's command line.

    Args:
        out: file that rank 0 writes.
    """

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.saves: list[float] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Put a clock around the Trainer's saving."""
        save = trainer.save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            save(*args, **kwargs)
            self.saves.append(time.perf_counter() - start)

        trainer.save_checkpoint = timed  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Start the run's clock."""
        self.start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        """Save once more, and write the numbers."""
        path = self.out.with_suffix(".ckpt")
        trainer.save_checkpoint(path)
        seconds = time.perf_counter() - self.start
        if trainer.is_global_zero:
            found = {"steps": trainer.global_step, "seconds": seconds, "saves": self.saves}
            self.out.write_text(json.dumps({**found, "file_bytes": path.stat().st_size}))


def measure(steps: int, every: int) -> dict[str, Any]:
    """Run the example; see :func:`main`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "examples/stdlib/train.py", "fit", "--config", "examples/stdlib/config.yaml"]
        settings = {
            "trainer.max_steps": steps,
            "trainer.max_time": "null",
            "trainer.default_root_dir": folder,
            "trainer.logger.init_args.save_dir": folder,
            "trainer.callbacks.dirpath": folder,
            "trainer.callbacks.every_n_train_steps": every,
            "trainer.callbacks+": "benchmarks.saving.SaveClock",
            "trainer.callbacks.out": out,
        }
        command += [f"--{name}={value}" for name, value in settings.items()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdin=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    saving = sum(found["saves"])
    return {**found, "every": every, "added": saving / (found["seconds"] - saving)}


def main(arguments: list[str] | None = None) -> None:
    """Run the example once, print the share, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="4 steps, a save every 3; nothing is written")
    options = parser.parse_args(arguments)
    found = measure(4, 3) if options.quick else measure(options.steps, 50)
    print(
        f"{len(found['saves'])} saves of {found['file_bytes'] / 1e6:.1f} MB in {found['steps']} steps took "
        f"{sum(found['saves']):.2f} s of {found['seconds']:.1f} s: {100 * found['added']:.2f} % more time "
        f"(goal: at most {100 * GOAL:.0f} %)"
    )
    if not options.quick:
        path = RESULTS / "saving.json"
        path.write_text(json.dumps({**facts(), **found}, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
