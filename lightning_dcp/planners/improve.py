"""Local search on the busiest rank, bounded by a number of moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_dcp.planners.assembly import settings_within
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.planners.schedule import Item, Schedule
from lightning_dcp.planners.tables import NEVER, Tables
from lightning_dcp.topology import Block

_LOOKED_AT = 12
_TARGETS = 3


class Move(NamedTuple):
    """Items to take away and items to place; ``value`` is the load of the busiest rank touched, afterwards."""

    value: int
    removed: tuple[Item, ...]
    added: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improver:
    """Moves micro-batches, or parts of them, away from the busiest rank.

    Attributes:
        request: what is planned.
        tables: its tabled times.
        cache: times asked for so far, by ``(sp_size, start, batch_size)``.
    """

    request: PlanRequest
    tables: Tables
    cache: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def improve(self, schedule: Schedule, max_moves: int, bound: int) -> None:
        """Apply the best move again and again, in place, until none helps or ``max_moves`` are made."""
        for _ in range(max_moves):
            makespan = schedule.makespan
            if makespan <= bound:
                return
            move = min(self._moves(schedule, makespan), default=None)
            if move is None or move.value >= makespan:
                return
            for item in move.removed:
                schedule.remove(item)
            for item in move.added:
                schedule.add(item)

    def _moves(self, schedule: Schedule, makespan: int) -> Iterator[Move]:
        busiest = int(schedule.loads.argmax())
        for item in schedule.on(busiest)[:_LOOKED_AT]:
            blocks = self.request.world.blocks_of(item.sp_size)
            others = sorted((schedule.load_of(block), block) for block in blocks if block != item.block)
            for load, block in others[:_TARGETS]:
                if load < makespan:
                    yield from self._relocations(item, load, block, makespan)
                    yield from self._exchanges(schedule, item, load, block, makespan)

    def _relocations(self, item: Item, load: int, block: Block, makespan: int) -> Iterator[Move]:
        """Move the last ``k`` samples of the item, or all of them, to another group."""
        for k in _parts(item.batch_size):
            kept = item.batch_size - k
            moved = self._item(item.start + kept, k, block)
            rest = (self._item(item.start, kept, item.block),) if kept else ()
            stays = makespan - item.nanoseconds + sum(part.nanoseconds for part in rest)
            yield Move(max(load + moved.nanoseconds, stays), (item,), (*rest, moved))

    def _exchanges(self, schedule: Schedule, item: Item, load: int, block: Block, makespan: int) -> Iterator[Move]:
        """Swap the item for a shorter one of the other group."""
        for other in schedule.on(block[0])[:_LOOKED_AT]:
            gain = item.nanoseconds - other.nanoseconds
            if other.block == block and gain > 0:
                there = item._replace(first_rank=block[0])
                here = other._replace(first_rank=item.first_rank)
                yield Move(max(load + gain, makespan - gain), (item, other), (there, here))

    def _item(self, start: int, batch_size: int, block: Block) -> Item:
        return Item(start, batch_size, *block, self._nanoseconds(block[1], start, batch_size))

    def _nanoseconds(self, sp_size: int, start: int, batch_size: int) -> int:
        row = int(np.searchsorted(self.tables.batch_sizes, batch_size))
        if row < len(self.tables.batch_sizes) and self.tables.batch_sizes[row] == batch_size:
            return int(self.tables.times[sp_size][row, start])
        key = (sp_size, start, batch_size)
        if key not in self.cache:
            largest = self.tables.shapes[start : start + batch_size].max(axis=0)
            found = settings_within(self.request, sp_size, np.asarray(batch_size), largest).nanoseconds
            self.cache[key] = min(int(found), NEVER)
        return self.cache[key]


def _parts(batch_size: int) -> tuple[int, ...]:
    """How many samples of a micro-batch may move: some, half, nearly all, all."""
    return tuple(
        sorted({k for k in (1, 2, 3, batch_size // 4, batch_size // 2, batch_size) if 0 < k <= batch_size})
    )
