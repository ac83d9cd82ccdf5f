"""Counts per second, over the last steps and since the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class Rates:
    """Rates of world counts; the same for every plan of the same samples, as nothing is counted per rank.

    Once the window is full a rate is that of Lightning's ``Throughput`` with ``window_size=window + 1`` and
    ``world_size=1``, fed with the world's counts. Before that it is the rate since the start, where ``Throughput``
    gives none.

    Args:
        window: steps of the moving rates.
    """

    def __init__(self, window: int) -> None:
        if type(window) is not int or window < 1:
            raise ValueError(f"the window of the rates is {window!r}; allowed are integers from 1")
        self._steps: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=window)
        self._seconds = 0.0
        self._counts: dict[str, float] = {}

    def add(self, seconds: float, counts: Mapping[str, float]) -> None:
        """Count a step in; the same keys in each."""
        self._steps.append((seconds, counts))
        self._seconds += seconds
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def recent(self) -> dict[str, float]:
        """Counts per second over the last steps."""
        seconds = sum(one for one, _ in self._steps)
        return {name: _rate(sum(row[name] for _, row in self._steps), seconds) for name in self._counts}

    def overall(self) -> dict[str, float]:
        """Counts per second since the start."""
        return {name: _rate(count, self._seconds) for name, count in self._counts.items()}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
