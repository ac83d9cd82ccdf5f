"""Build DeepSpeed's CPU operator once, alone.

The first engine on a machine compiles a C++ operator, which takes from half a minute to more than one. Two
processes that meet that build at once wait for each other's lock file; when a run is killed during the build, the
lock stays and every later run waits for ever. So the build is done here, before any run.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

STALE_AFTER_S = 60.0
"""A lock is held without a compiler only for moments: before ninja starts and after it ends."""


def remove_stale_locks(root: Path, now: float | None = None) -> list[Path]:
    """Delete lock files below ``root`` whose build no longer runs, and return them.

    A lock holds no process id. ninja and its compilers run in the folder of the extension, so a lock is stale when
    it is old and no process has that folder as its working directory.

    Args:
        root: folder of torch's extensions: ``root / [tag /] name / lock``.
        now: seconds since the epoch; the present if not given.
    """
    moment = time.time() if now is None else now
    removed = []
    for lock in sorted(root.glob("**/lock")):
        if moment - lock.stat().st_mtime > STALE_AFTER_S and not _is_building(lock.parent):
            lock.unlink()
            removed.append(lock)
    return removed


def _is_building(folder: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve(strict=True) == folder.resolve():
                return True
        except OSError:  # the process has ended, or belongs to someone else
            continue
    return False


def build() -> None:
    """Start an engine of one process, which compiles what DeepSpeed needs on this machine."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS="1")
    import deepspeed
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        model = torch.nn.Linear(2, 2)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        dist.destroy_process_group()


def main() -> None:
    """Remove what a killed build left, then build."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in remove_stale_locks(root):
        print(f"removed {lock}: no build of it is running")
    start = time.monotonic()
    build()
    print(f"DeepSpeed's operator is ready ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
