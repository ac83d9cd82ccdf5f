"""A small fit that says how it was launched; a program for real launchers, and processes that look launched.

The processes come from the fork server of the pool, so each costs a fork instead of ten seconds, but nothing of a
process group is there yet: they find each other by their environment, as those of ``srun`` do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback

from tests.fitting import Case, Data, Module, Result, make_strategy, make_trainer, weights_of
from tests.pool import PRELOAD

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"),
)


def case_of(world_size: int, steps: int = 4) -> Case:
    return Case(world_size=world_size, samples=16, batch=8, steps=steps, seed=3, masked="none")


def train(folder: str, num_nodes: int, devices: int, **trainer: Any) -> None:
    """Train on as many ranks as the launch has, and write what this rank ends with."""
    case = case_of(num_nodes * devices)
    plans: list[str] = []

    class Plans(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]

    module = Module(case)
    start = weights_of(module)
    made = make_trainer(
        make_strategy(case), case, num_nodes=num_nodes, devices=devices, callbacks=[Plans()], **trainer
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(module, datamodule=Data(case))
    strategy = made.strategy
    torch.save(
        {
            "result": (start, weights_of(module), module.losses, plans),
            "blocks": strategy._prepared.world.blocks,  # type: ignore[attr-defined]
            "environment": type(strategy.cluster_environment).__name__,  # type: ignore[attr-defined]
            "restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
            "launcher": type(strategy.launcher).__name__,
            "warnings": [str(w.message) for w in caught],
        },
        Path(folder, f"{made.global_rank}.pt"),
    )


def read(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """What each rank wrote."""
    content = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    for row in content:
        start, weights, losses, plans = row["result"]
        row["result"] = Result(start=start, weights=weights, losses=losses, plans=plans)
    return content


def begin(
    function: Callable[..., Any],
    environments: Sequence[Mapping[str, str]],
    *args: Any,
    namespaces: Sequence[str] = (),
) -> list[tuple[Any, Any]]:
    """Call a function in one process for each environment; each process and where its answer will come.

    Args:
        function: top-level.
        environments: variables of each process, beside those of this one without a trace of another launch.
        args: of the function.
        namespaces: name of the network namespace of each process; empty for this one's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    begun = []
    for index, environment in enumerate(environments):
        ours, theirs = context.Pipe()
        place = namespaces[index] if namespaces else ""
        process = context.Process(target=_run, args=(theirs, dict(environment), place, function, args))
        process.start()
        theirs.close()
        begun.append((process, ours))
    return begun


def finish(begun: Sequence[tuple[Any, Any]], timeout: float = 90.0) -> list[str]:
    """What each process raised, as text; empty where it came back.

    Raises:
        TimeoutError: a process did not end in ``timeout`` seconds; all are killed.
    """
    deadline = time.monotonic() + timeout
    for process, _ in begun:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [index for index, (process, _) in enumerate(begun) if process.exitcode is None]
    for index in late:
        begun[index][0].kill()
        begun[index][0].join()
    if late:
        raise TimeoutError(f"processes {late} did not end in {timeout} seconds")
    return [end.recv() if end.poll() else f"ended with {process.exitcode}" for process, end in begun]


def start(*args: Any, timeout: float = 90.0, **kwargs: Any) -> list[str]:
    """:func:`begin`, then :func:`finish`."""
    return finish(begin(*args, **kwargs), timeout)


class Watched(Callback):
    """Leaves a file for what happens to this rank."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        (self.folder / f"pid {trainer.global_rank}").write_text(str(os.getpid()))

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        kind = type(exception).__name__
        (self.folder / f"ended {trainer.global_rank}").write_text(f"{kind} {trainer.global_step}")


def endless(folder: str) -> None:
    """Two ranks by Lightning's launcher, which runs this file again, until somebody stops them."""
    sys.modules["__main__"].__spec__ = None
    sys.argv = [__file__, folder, "endless"]
    case = case_of(2, steps=1_000_000)
    trainer = make_trainer(make_strategy(case), case, devices=2, callbacks=[Watched(folder)])
    trainer.fit(Module(case), datamodule=Data(case))


def _run(
    answer: Any, environment: dict[str, str], namespace: str, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_only

    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    if namespace:
        with Path("/var/run/netns", namespace).open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    rank_zero_only.rank = int(environment.get("SLURM_PROCID", environment.get("RANK", "0")))  # type: ignore[attr-defined]
    try:
        function(*args)
        answer.send("")
    except BaseException as error:
        answer.send("".join(traceback.format_exception_only(error)))
        traceback.print_exc()


if __name__ == "__main__":
    if sys.argv[2] == "endless":
        endless(sys.argv[1])
    else:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
