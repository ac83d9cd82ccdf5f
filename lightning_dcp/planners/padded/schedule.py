"""A plan in the making: micro-batches as runs of the sorted samples, and how busy each rank is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_dcp.planners.padded.pour import Item
from lightning_dcp.topology import Block


class Schedule:
    """Items that hold each sample once, with the busy nanoseconds of each rank.

    Attributes:
        loads: busy nanoseconds, shape ``[W]``.
        at: item by its first sample.
        until: item by the sample behind its last.
        on: items of each rank, in the order in which they came.
    """

    def __init__(self, world_size: int, items: Iterable[Item]) -> None:
        self.loads = np.zeros(world_size, dtype=np.int64)
        self.at: dict[int, Item] = {}
        self.until: dict[int, Item] = {}
        self.on: list[list[Item]] = [[] for _ in range(world_size)]
        for item in items:
            self.add(item)

    @property
    def items(self) -> list[Item]:
        """All items by their first sample, longest samples first."""
        return sorted(self.at.values())

    @property
    def makespan(self) -> int:
        """Busy nanoseconds of the busiest rank."""
        return int(self.loads.max())

    def add(self, item: Item) -> None:
        """Place one more micro-batch."""
        self.at[item.start] = self.until[item.start + item.batch_size] = item
        first, end = item.first_rank, item.first_rank + item.sp_size
        self.loads[first:end] += item.nanoseconds
        for mine in self.on[first:end]:
            mine.append(item)

    def remove(self, item: Item) -> None:
        """Take a micro-batch away."""
        del self.at[item.start], self.until[item.start + item.batch_size]
        first, end = item.first_rank, item.first_rank + item.sp_size
        self.loads[first:end] -= item.nanoseconds
        for mine in self.on[first:end]:
            mine.remove(item)

    def load_of(self, block: Block) -> int:
        """Busy nanoseconds of the busiest rank of a group."""
        first, size = block
        return int(self.loads[first] if size == 1 else self.loads[first : first + size].max())
