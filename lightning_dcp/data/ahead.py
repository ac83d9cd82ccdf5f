"""One pass over the steps that are left of an epoch, read ahead by workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from lightning_dcp.data.batch import DCPBatch, StepPlan
from lightning_dcp.data.feeding import Planned
from lightning_dcp.data.reading import Feed, LoaderOptions, Reader, Reading, Task, torch_loader
from lightning_dcp.data.standing import Standing

Begin = Callable[[deque[Planned]], Iterator[Task]]
"""Starts planning where the run stands: gives the tasks, and puts the plan of each into the queue."""


class ReadAhead:
    """The workers of a train loader, which outlive its passes; one pass runs at a time.

    Args:
        reader: performs the tasks.
        options: how samples are read.

    Attributes:
        running: the pass that reads now.
        waited_seconds: spent in ``next`` so far.
    """

    def __init__(self, reader: Reader, options: LoaderOptions) -> None:
        self.running: StepPass | None = None
        self.waited_seconds = 0.0
        self._reader = reader
        self._options = options
        self._feed = Feed()
        self._torch_loader: DataLoader[Reading] | None = None

    def open(self, steps: StepPass, tasks: Iterator[Task]) -> Iterator[Reading]:
        """Read for another pass; what an earlier one has not read any more is lost."""
        self.running, self._feed.coming = steps, tasks
        if self._torch_loader is None:
            self._torch_loader = torch_loader(self._reader, self._feed, self._options)
        return iter(self._torch_loader)

    def close(self) -> None:
        """Stop the workers; a later pass starts new ones."""
        self._torch_loader = self.running = None


class StepPass:
    """The steps that are left of an epoch; nothing is decided before the first ``next``.

    Args:
        ahead: reads them.
        begin: see :data:`Begin`.
        standing: where the run stands.
    """

    def __init__(self, ahead: ReadAhead, begin: Begin, standing: Standing) -> None:
        self._ahead = ahead
        self._begin = begin
        self._standing = standing
        self._readings: Iterator[Reading] | None = None
        self._planned: deque[Planned] = deque()
        self._version = -1
        self._lost: str | None = None

    def __iter__(self) -> StepPass:
        return self

    def __next__(self) -> DCPBatch:
        start = time.perf_counter()
        try:
            return self._step()
        finally:
            self._ahead.waited_seconds += time.perf_counter() - start

    def _step(self) -> DCPBatch:
        if self._readings is None:
            self._readings = self._ahead.open(self, self._begin(self._planned))
            self._version = self._standing.version
        self._check_current()
        reading = self._next_reading(self._readings)
        head = self._planned.popleft()
        if head.error is not None:
            raise head.error
        assert head.plan is not None
        return DCPBatch(head.epoch, head.step, StepPlan(head.plan), reading.data, reading.error)

    def _next_reading(self, readings: Iterator[Reading]) -> Reading:
        if self._lost is not None:
            raise RuntimeError(f"nothing more can be read: {self._lost}")
        try:
            return next(readings)
        except StopIteration:
            raise
        except Exception as error:
            # Not from our code, whose errors come as text: torch reports a worker that was killed, or its half-sent
            # data cannot be received (ConnectionResetError, FileNotFoundError, EOFError).
            self._ahead.close()
            if not self._planned:
                raise
            self._lost = f"a worker process ended while samples were read: {error}"
            self._readings = iter(())
            head = self._planned[0]
            ids = [i for m in head.mine for i in m.sample_ids]
            return Reading((), f"step {head.step} of epoch {head.epoch}, samples {ids}: {self._lost}")

    def _check_current(self) -> None:
        if self._ahead.running is not self and self._lost is None:
            raise RuntimeError("a newer iterator of this loader is in use; only one pass runs at a time")
        if self._version != self._standing.version:
            raise RuntimeError(
                "the epoch or the position of the loader was set after its first step was read; call "
                "iter(loader) again. Where the number of steps differs between epochs use DCPDataModule, which "
                "sets them before"
            )
