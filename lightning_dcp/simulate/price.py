"""From tokens per second to hours, money and the smallest cluster that meets a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.simulate.tally import Simulation

LARGEST_WORLD = 65_536
"""Most ranks that the search for a deadline tries."""

_CHUNK = 65_536
_WORTHWHILE = 0.98
"""Twice the ranks must bring the hours below this share, or the search gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Result of :func:`smallest_world`.

    Attributes:
        world_size: fewest ranks that meet the deadline; ``None`` where no number does.
        hours: hours of :attr:`world_size`, else of the fastest world that was tried.
        tried: ranks and hours of every world that was tried, by rising ranks; infinite where a sample does not fit.
    """

    world_size: int | None
    hours: float
    tried: tuple[tuple[int, float], ...]


def own_work(cost: CostModel, shapes: IntArray) -> IntArray:
    """Rank-nanoseconds of each sample's own work (:meth:`CostModel.useful_time`), int64 ``[n]``.

    Args:
        cost: the cost model.
        shapes: sizes of the samples, ``[n, axes]``.
    """
    tokens = np.asarray(shapes.prod(axis=1), dtype=np.int64)
    # In parts, since each sample takes some dozen numbers on the way.
    parts = [cost.useful_time(tokens[start : start + _CHUNK]) for start in range(0, len(tokens), _CHUNK)]
    return np.concatenate(parts)


def hours_needed(simulation: Simulation, work: float) -> float:
    """Hours to train samples of this much own work as the simulation did.

    Work and not tokens: where few samples take most of the time, the tokens per second of some steps say little of
    others, and the useful share says much.

    Args:
        simulation: some steps of the same data.
        work: rank-nanoseconds of :func:`own_work`, summed.
    """
    return work / simulation.work * simulation.seconds / 3600.0


def smallest_world(
    hours_at: Callable[[int], float], deadline_hours: float, ranks_per_node: int, largest: int = LARGEST_WORLD
) -> Deadline:
    """Fewest ranks that meet a deadline: powers of two inside a node, whole nodes beyond.

    More ranks are taken to be no slower. The number is doubled until it meets the deadline or gains no more, then
    halved into between in whole nodes.

    Args:
        hours_at: hours of a world of so many ranks; infinite where it cannot train the samples.
        deadline_hours: the deadline.
        ranks_per_node: ranks of a node.
        largest: most ranks that are tried.
    """
    tried: dict[int, float] = {}

    def meets(world_size: int) -> bool:
        if world_size not in tried:
            tried[world_size] = hours_at(world_size)
        return tried[world_size] <= deadline_hours

    inside = [w for w in (2**k for k in range(ranks_per_node.bit_length())) if w < ranks_per_node]
    found, below = None, 0
    for world_size in [*inside, *_doubled(ranks_per_node, largest)]:
        if meets(world_size):
            found = world_size
            break
        if tried[world_size] > _WORTHWHILE * tried.get(below, float("inf")):
            break
        below = world_size
    if found is not None and found > ranks_per_node:
        low, high = below // ranks_per_node, found // ranks_per_node
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle * ranks_per_node) else (middle, high)
        found = high * ranks_per_node
    hours = tried[found] if found else min(tried.values())
    return Deadline(world_size=found, hours=hours, tried=tuple(sorted(tried.items())))


def _doubled(first: int, largest: int) -> list[int]:
    sizes = [first]
    while 2 * sizes[-1] <= largest:
        sizes.append(2 * sizes[-1])
    return sizes
