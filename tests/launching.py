"""A small fit that says how it was launched; a program for real launchers, and processes that look launched.

The processes come from the fork server of the pool, so each costs a fork instead of ten seconds, but nothing of a
process group is there yet: they find each other by their environment, as those of ``srun`` do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

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
    import lightning.pytorch as pl

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


def start(
    function: Callable[..., Any],
    environments: Sequence[Mapping[str, str]],
    *args: Any,
    namespaces: Sequence[str] = (),
    timeout: float = 90.0,
) -> list[str]:
    """Call a function in one process for each environment; what each raised, as text, empty where it came back.

    Args:
        function: top-level.
        environments: variables of each process, beside those of this one without a trace of another launch.
        args: of the function.
        namespaces: name of the network namespace of each process; empty for this one's.
        timeout: seconds after which all are killed.

    Raises:
        TimeoutError: a process did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes, ends = [], []
    for index, environment in enumerate(environments):
        ours, theirs = context.Pipe()
        place = namespaces[index] if namespaces else ""
        process = context.Process(target=_run, args=(theirs, dict(environment), place, function, args))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    late: list[int] = []
    for index, process in enumerate(processes):
        process.join(timeout if not late else 0.1)
        if process.exitcode is None:
            late.append(index)
            process.kill()
            process.join()
    if late:
        raise TimeoutError(f"processes {late} did not end in {timeout} seconds")
    return [
        end.recv() if end.poll() else f"ended with {p.exitcode}" for end, p in zip(ends, processes, strict=True)
    ]


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
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
