"""A plan in the making: micro-batches as runs of the sorted samples, and how busy each rank is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_dcp.topology import Block


class Item(NamedTuple):
    """The ``batch_size`` samples from ``start`` on, in sorted order, on one group."""

    start: int
    batch_size: int
    first_rank: int
    sp_size: int
    nanoseconds: int

    @property
    def block(self) -> Block:
        """The group."""
        return self.first_rank, self.sp_size


class Schedule:
    """Items with the busy nanoseconds of each rank.

    Attributes:
        items: micro-batches in the order in which they were placed.
        loads: busy nanoseconds, shape ``[W]``.
    """

    def __init__(self, world_size: int) -> None:
        self.items: list[Item] = []
        self.loads = np.zeros(world_size, dtype=np.int64)

    @property
    def makespan(self) -> int:
        """Busy nanoseconds of the busiest rank."""
        return int(self.loads.max())

    def add(self, item: Item) -> None:
        """Place one more micro-batch."""
        self.items.append(item)
        self.loads[item.first_rank : item.first_rank + item.sp_size] += item.nanoseconds

    def remove(self, item: Item) -> None:
        """Take a micro-batch away."""
        self.items.remove(item)
        self.loads[item.first_rank : item.first_rank + item.sp_size] -= item.nanoseconds

    def load_of(self, block: Block) -> int:
        """Busy nanoseconds of the busiest rank of a group."""
        return int(self.loads[block[0] : block[0] + block[1]].max())

    def on(self, rank: int) -> list[Item]:
        """Micro-batches of one rank, narrow groups first, short ones first."""
        mine = [item for item in self.items if item.first_rank <= rank < item.first_rank + item.sp_size]
        return sorted(mine, key=lambda item: (item.sp_size, item.nanoseconds, item.start))
