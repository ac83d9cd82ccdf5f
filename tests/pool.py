"""Pools of forked gloo workers: a distributed test is a top-level function that runs in all of them.

A fork server imports torch, Lightning and DeepSpeed once, so a worker costs a fork instead of ten seconds. Each
call makes a process group of its own size over a fresh store and destroys it afterwards, so nothing is handed
from one test to the next. A call that outlasts its limit kills the pool: hangs are our failure mode.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["tests.preload"]


class RemoteError(AssertionError):
    """A worker raised; the message holds its rank and traceback."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(tracebacks.items())))


class Pool:
    """Up to ``size`` workers, started when first needed and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        patience: float = 10.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ``world_size`` ranks; results in rank order.

        ``torch.distributed`` is initialised in the workers, and the environment is that of a torchrun launch,
        so ``Trainer(devices=world_size)`` works inside. After one rank failed the others get ``patience`` seconds to
        fail too.

        Raises:
            RemoteError: a worker raised.
            TimeoutError: the call outlasted ``timeout`` seconds.
        """
        if world_size > self.size:
            raise ValueError(f"{world_size} ranks asked of a pool of {self.size}")
        while len(self._workers) < world_size:
            self._start_worker()
        with tempfile.TemporaryDirectory() as folder:
            task = pickle.dumps((function, args, kwargs, world_size, str(Path(folder, "store")), timeout))
            connections = [connection for _, connection in self._workers[:world_size]]
            for connection in connections:
                connection.send_bytes(task)
            return self._collect(connections, time.monotonic() + timeout, patience)

    def _collect(self, connections: list[Connection], deadline: float, patience: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        failed_at: float | None = None
        while len(answers) < len(connections):
            waiting = [c for rank, c in enumerate(connections) if rank not in answers]
            limit = deadline if failed_at is None else min(deadline, failed_at + patience)
            ready = wait(waiting, timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = (False, "the worker died")
                if not answers[rank][0]:
                    failed_at = failed_at or time.monotonic()
        errors = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if errors or len(answers) < len(connections):
            self.close()
        if errors:
            raise RemoteError(errors)
        if len(answers) < len(connections):
            missing = sorted(set(range(len(connections))) - answers.keys())
            raise TimeoutError(f"ranks {missing} gave no answer in time; the pool was killed")
        return [answers[rank][1] for rank in range(len(connections))]

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        # Not daemonic: a worker's DataLoader may start processes of its own.
        process = context.Process(target=_serve, args=(theirs, len(self._workers)))
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        """Kill the workers; the next call starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _serve(connection: Connection, rank: int) -> None:
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = (True, _perform(task, rank))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def _perform(task: bytes, rank: int) -> Any:
    import torch
    import torch.distributed as dist
    from lightning_utilities.core.rank_zero import rank_zero_only

    function, args, kwargs, world_size, store, timeout = pickle.loads(task)
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "pool", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.manual_seed(0)
    # As after a launch: Lightning takes the rank from the environment when it is imported, which was long ago.
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        result = function(*args, **kwargs)
        dist.barrier()
        return result
    finally:
        _reset(before)


def _reset(environment: dict[str, str]) -> None:
    """Forget what a test left in torch.distributed, DeepSpeed and the environment (a seed for all later trainers)."""
    import deepspeed.comm.comm as ds_comm
    import torch.distributed as dist

    from lightning_dcp.sequence_parallel import context

    if dist.is_initialized():
        dist.destroy_process_group()
    ds_comm.cdb = None
    os.environ.clear()
    os.environ.update(environment)
    context._active = None
    _reset_deepspeed_groups()


def _reset_deepspeed_groups() -> None:
    """DeepSpeed keeps process groups in module globals; those of a destroyed world must not be used again."""
    import deepspeed.utils.groups as groups

    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper() and not name.startswith("__"):
            if isinstance(value, dict):
                value.clear()
            elif not isinstance(value, str):
                setattr(groups, name, None)
