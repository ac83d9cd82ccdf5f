"""Clocks for probes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks, and tells the time between two of them afterwards."""

    def mark(self) -> Any:
        """Note the present; cheap, without waiting for a device."""
        ...

    def nanoseconds(self, start: Any, end: Any) -> int:
        """Time between two marks; waits for the second where needed."""
        ...


ClockFactory = Callable[[torch.device, int], Clock]
"""From device and sequence-parallel size to a clock."""


class ThreadClock:
    """CPU time of this thread: other processes on the machine do not disturb it (3 to 4 % noise; wall time 25 %).

    It does not see the waiting for other ranks. For layers that exchange, the larger of CPU and wall time counts.

    Args:
        exchanges: whether the work between marks communicates with other ranks.
    """

    def __init__(self, exchanges: bool) -> None:
        self._exchanges = exchanges

    def mark(self) -> tuple[int, int]:
        """CPU time of the thread and wall time, in nanoseconds."""
        return time.thread_time_ns(), time.perf_counter_ns()

    def nanoseconds(self, start: tuple[int, int], end: tuple[int, int]) -> int:
        """CPU time, or with exchanges the wall time if that is longer."""
        thread, wall = end[0] - start[0], end[1] - start[1]
        return max(thread, wall) if self._exchanges else thread


class CudaClock:
    """Events on the current stream; exchanges on it are part of the time."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def nanoseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Time between two events, after the second was reached."""
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


def clock_for(device: torch.device, sp_size: int) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else ThreadClock(exchanges=sp_size > 1)
