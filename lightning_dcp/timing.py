"""When micro-batches ran: host clock on CPU, events on CUDA, read once per step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dcp.records import Span


class SpanClock:
    """Records the spans of one step's micro-batches on this rank.

    On CUDA a pair of events per micro-batch goes into the current stream; nothing is synchronised until
    :meth:`spans` is asked for.

    Args:
        device: device that the micro-batches run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._origin = self._mark()
        self._marks: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure one micro-batch, forward and backward."""
        start = self._mark()
        yield
        self._marks.append((start, self._mark()))

    def spans(self) -> tuple[Span, ...]:
        """All spans so far; on CUDA waits for the last one to end."""
        return tuple((self._since(start), self._since(end)) for start, end in self._marks)

    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return self._since(self._mark())

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()
            assert isinstance(self._origin, torch.cuda.Event)
            return float(self._origin.elapsed_time(mark)) / 1000.0
        assert not isinstance(self._origin, torch.cuda.Event)
        return mark - self._origin
