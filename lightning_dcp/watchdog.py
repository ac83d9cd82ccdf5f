"""Where each rank is, said by the error or by a thread of ours when a collective waits too long.

A backend says at most that an operation timed out. gloo raises that in the call that waited; NCCL aborts the process
from a thread of its own. So the place is noted as the step goes on, and a monitor thread prints it shortly before the
time limit, with the places of the other ranks, which lie in the process group's store by then.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_dcp.agreement import StepError
from lightning_dcp.plan import MicroBatch

BETWEEN = "between two steps (waiting for data, in a callback or in the optimizer)"
_MOST_TOLD = 8
"""Ranks whose places one rank tells; of a thousand, the rest says the same."""


class Whereabouts:
    """The place of this rank; written by the step, which costs some attribute writes per micro-batch.

    Args:
        rank: global rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place = ""
        self.micro_batch: MicroBatch | None = None
        self.index = (0, 0)
        self.doing = BETWEEN
        self.since = time.monotonic()

    def at(self, doing: str) -> None:
        """Note what this rank does from now on."""
        self.doing, self.since = doing, time.monotonic()

    def step(self, epoch: int, step: int) -> None:
        """Note the step that begins."""
        self.place = f"step {step} of epoch {epoch}"

    def enter(self, micro_batch: MicroBatch, index: int, number: int) -> None:
        """Note the micro-batch that begins, the ``index``-th of ``number`` of this rank."""
        self.micro_batch, self.index = micro_batch, (index, number)
        self.at("in training_step or its backward")

    def leave(self) -> None:
        """Note that no micro-batch runs."""
        self.micro_batch = None

    def sentence(self) -> str:
        """Rank, step, micro-batch with its samples and group, and what this rank does since when."""
        parts = [f"rank {self.rank}", *([self.place] if self.place else [])]
        running = self.micro_batch
        if running is not None:
            last = running.first_rank + running.sp_size - 1
            group = f"ranks {running.first_rank}..{last}" if running.sp_size > 1 else "this rank alone"
            index, number = self.index
            parts.append(f"micro-batch {index + 1} of {number} (samples {running.sample_ids}) on {group}")
        return f"{', '.join(parts)}: {self.doing} for {time.monotonic() - self.since:.0f} s"


class Watchdog:
    """A thread that tells where the ranks are before a collective's time limit ends.

    It wakes every few seconds, at least twenty times within the limit, and touches the store only once a rank has been
    at one place for half of the limit.

    Args:
        where: the place of this rank.
        limit: time limit of the process groups.
        world_size: number of ranks.
    """

    def __init__(self, where: Whereabouts, limit: timedelta, world_size: int) -> None:
        self.where = where
        self._limit = limit.total_seconds()
        self._world_size = world_size
        self._main = threading.current_thread().ident
        self._stop = threading.Event()
        # A connection of its own: a call of the main thread that waits would block the thread.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set(_key(where.rank), "")  # of an earlier fit over the same store
        self._thread = threading.Thread(target=self._run, name="lightning_dcp watchdog", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[Watchdog]:
        """Watch until the end of the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def others(self) -> list[str]:
        """What the other ranks said of their places, as far as they have."""
        return _told(self._store, _key, self.where.rank, self._world_size)

    def errors(self) -> list[str]:
        """The errors that other ranks have ended with, as far as they could say so."""
        return _told(self._store, _error_key, self.where.rank, self._world_size)

    def _run(self) -> None:
        interval = min(5.0, self._limit / 20)
        published = told = -1.0
        while not self._stop.wait(interval):
            since = self.where.since
            waited = time.monotonic() - since
            if waited > self._limit / 2 and since != published:
                published = since
                self._publish()
            if waited > self._limit * 0.9 and since != told and self.where.doing != BETWEEN:
                told = since
                self._tell()

    def _publish(self) -> None:
        try:
            self._store.set(_key(self.where.rank), f"{self.where.sentence()}, at {self._line()}")
        except RuntimeError:  # the process that holds the store has gone
            self._stop.set()

    def _tell(self) -> None:
        try:
            others = self.others()
        except RuntimeError:
            others = []
        lines = [f"{self.where.sentence()}, at {self._line()}", *others]
        limit = f"The time limit of {self._limit:.0f} s of DCPStrategy(timeout=...) ends soon."
        print("\n".join(["lightning_dcp:", *lines, limit]), file=sys.stderr, flush=True)

    def _line(self) -> str:
        """The innermost line of the main thread that is neither torch's nor Lightning's."""
        frame = sys._current_frames().get(self._main or 0)
        found = frame
        while frame is not None:
            if _is_users(frame):
                found = frame
                break
            frame = frame.f_back
        if found is None:
            return "an unknown line"
        line = traceback.extract_stack(found, limit=1)[0]
        return f"{line.filename}:{line.lineno} in {line.name}"


def leave_word(rank: int, text: str) -> None:
    """Say in the store of the process group, if there is one, what ends this rank; ``""`` for a new start."""
    with suppress(RuntimeError, ValueError):
        dist.distributed_c10d._get_default_store().set(_error_key(rank), text)


def last_word(error: BaseException, rank: int, world_size: int) -> None:
    """Tell the ranks that wait for this one what ends it; note in a backend's error what has ended the others."""
    if not is_of_the_network(error):
        leave_word(rank, f"rank {rank} ended with {type(error).__name__}: {error}")
        return
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        for text in _told(store, _error_key, rank, world_size):
            error.add_note(text)


def _told(store: Any, key_of: Callable[[int], str], rank: int, world_size: int) -> list[str]:
    told: list[str] = []
    for other in range(world_size):
        if other != rank and len(told) < _MOST_TOLD and store.check([key_of(other)]):
            told.append(store.get(key_of(other)).decode())
    return [text for text in told if text]


def _key(rank: int) -> str:
    return f"lightning_dcp/where/{rank}"


def _error_key(rank: int) -> str:
    return f"lightning_dcp/error/{rank}"


def _is_users(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name not in {"torch", "lightning", "deepspeed", "lightning_dcp", "threading", "contextlib"}


def is_of_the_network(error: BaseException) -> bool:
    """Whether an error is a backend's: a collective timed out, or another process has gone."""
    if isinstance(error, StepError):  # agreed on by all ranks, though it may quote a backend
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def timed_out(error: BaseException) -> bool:
    """Whether a backend's error is that nobody came in time."""
    return "imed out" in str(error) or "imeout" in str(error)


@contextmanager
def explained(where: Whereabouts, watchdog: Watchdog | None, doing: str, reasons: list[str]) -> Iterator[None]:
    """Raise a backend's error with the places of the ranks, and what this rank knows of the cause.

    Args:
        where: the place of this rank.
        watchdog: knows the places of the others.
        doing: what this rank does inside.
        reasons: what has already gone wrong on this rank.

    Raises:
        StepError: the backend raised.
    """
    where.at(doing)
    try:
        yield
    except RuntimeError as error:
        if not is_of_the_network(error):
            raise
        raise StepError("\n".join([place_of(error, where, watchdog), *reasons])) from error


def place_of(error: BaseException, where: Whereabouts, watchdog: Watchdog | None) -> str:
    """A backend's error with the places of the ranks, in one sentence and a line for each other rank."""
    what = "did not come in time" if timed_out(error) else "has gone"
    lines = [f"{where.sentence()}, and another rank {what} ({_short(error)})"]
    if watchdog is not None:
        with suppress(RuntimeError):
            lines += watchdog.others() if timed_out(error) else watchdog.errors()
    return "\n".join(lines)


def _short(error: BaseException) -> str:
    """The first sentence of a backend's error, without the file it comes from."""
    return str(error).partition("] ")[2].partition(". ")[0] or str(error)
