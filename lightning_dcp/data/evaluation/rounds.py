"""Who evaluates what: each sample once, every rank equally many items.

A round is one item of every rank: micro-batches on disjoint groups of the world's family. A rank that is left without
a sample gets a copy of one that does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.data.evaluation.groups import Family, FreeGroups
from lightning_dcp.planners.assembly import pad, padded_tokens
from lightning_dcp.topology import World

_MOST_SIZES = 1024
"""Token counts at which the memory of micro-batches is looked up; sizes between two count as the larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Samples that run together on ``sp_size`` ranks, somewhere."""

    ids: tuple[int, ...]
    sp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One item of a rank.

    Attributes:
        ids: samples of the micro-batch.
        first_rank, sp_size: the group that computes it.
        is_copy: the samples belong to another item too, and this one does not count.
    """

    ids: tuple[int, ...]
    first_rank: int
    sp_size: int = 1
    is_copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What fits: a forward needs less than a training step with every layer recomputed.

    Attributes:
        cost: the cost model.
        memory_bytes: limit per rank.
        exact_shapes: only equal shapes may share a micro-batch, as padding changes the model's result.
    """

    cost: CostModel
    memory_bytes: int
    exact_shapes: bool = False

    def fits(self, sp_size: int, batch_size: IntArray, tokens: IntArray) -> IntArray:
        """Whether ``M(b, s, p, r = L)`` (Eq. 6) is within the limit, for arrays."""
        found = self.cost.settings(sp_size, batch_size, tokens, self.memory_bytes, "full")
        return np.asarray(found.bytes <= self.memory_bytes)


def even(samples: Sequence[int], batch_size: int, world_size: int, rank: int) -> list[Assignment]:
    """Items of one rank where every group has one rank: whole rounds in order, then the rest spread evenly.

    Args:
        samples: their ids, in the order of evaluation.
        batch_size: samples of a micro-batch.
        world_size: number of ranks ``W``.
        rank: whose items.
    """
    whole = len(samples) // (batch_size * world_size)
    starts = [(k * world_size + rank) * batch_size for k in range(whole)]
    items = [Assignment(ids=tuple(samples[i : i + batch_size]), first_rank=rank) for i in starts]
    rest = samples[whole * batch_size * world_size :]
    if len(rest):
        items.append(_share(rest, world_size, rank))
    return items


def dealt(batches: Sequence[Sequence[int]], world_size: int, rank: int) -> list[Assignment]:
    """Items of one rank where batches are to stay as they are: rank ``r`` gets every ``W``-th."""
    rounds = -(-len(batches) // world_size)
    numbers = [k * world_size + rank for k in range(rounds)]
    return [
        Assignment(ids=tuple(batches[i]), first_rank=rank)
        if i < len(batches)
        else Assignment(ids=tuple(batches[-1]), first_rank=rank, is_copy=True)
        for i in numbers
    ]


def _share(rest: Sequence[int], world_size: int, rank: int) -> Assignment:
    parts = min(len(rest), world_size)
    if rank >= parts:
        return Assignment(ids=tuple(rest[:1]), first_rank=rank, is_copy=True)
    small, longer = divmod(len(rest), parts)
    start = rank * small + min(rank, longer)
    return Assignment(ids=tuple(rest[start : start + small + (rank < longer)]), first_rank=rank)


def mixed(shapes: IntArray, batch_size: int, world: World, rule: MemoryRule) -> list[list[Assignment]] | None:
    """Rounds of all ranks where samples need groups of different sizes; ``None`` where :func:`even` does.

    Args:
        shapes: sizes of all samples, ``[n, axes]``.
        batch_size: most samples of a micro-batch.
        world: the groups that may be used.
        rule: what fits the memory.
    """
    longest = padded_tokens(shapes.max(axis=0), 1)
    if not rule.exact_shapes and bool(rule.fits(1, np.asarray(batch_size), longest)):
        return None
    sizes = _needed_sizes(shapes, world, rule)
    pieces = _pieces(shapes, sizes, batch_size, rule)
    shortest = int(np.lexsort((shapes.prod(axis=1), sizes))[0])
    spare = Piece(ids=(shortest,), sp_size=int(sizes[shortest]))
    return rounds_of(pieces, world, spare)


def of_rank(rounds: Iterable[Sequence[Assignment]], rank: int) -> list[Assignment]:
    """The items of one rank: one of each round."""
    return [a for placed in rounds for a in placed if 0 <= rank - a.first_rank < a.sp_size]


def _needed_sizes(shapes: IntArray, world: World, rule: MemoryRule) -> IntArray:
    """For each sample the smallest ``p`` at which it fits alone; the largest where none does."""
    usable = [p for p in world.sp_sizes if p in rule.cost.sp_sizes] or [1]
    needed = np.zeros(len(shapes), dtype=np.int64)
    for p in usable:
        tokens = padded_tokens(shapes, p)
        fitting = rule.fits(p, np.asarray(1), tokens)
        if rule.exact_shapes:
            fitting &= tokens == shapes.prod(axis=1)
        needed[(needed == 0) & fitting] = p
    unshared = 1 if rule.exact_shapes else usable[-1]
    needed[needed == 0] = unshared
    return needed


def _pieces(shapes: IntArray, sizes: IntArray, batch_size: int, rule: MemoryRule) -> list[Piece]:
    """Neighbours that need groups of one size, as many together as fit and ``batch_size`` allows."""
    caps = {int(p): _caps(shapes[sizes == p], int(p), batch_size, rule) for p in np.unique(sizes)}
    pieces: list[Piece] = []
    ids: list[int] = []
    size, largest = 0, ()
    for i, (row, p) in enumerate(zip(shapes.tolist(), sizes.tolist(), strict=True)):
        joined = tuple(map(max, largest, row)) if ids else tuple(row)
        alike = p == size and (not rule.exact_shapes or tuple(row) == largest)
        if ids and not (alike and len(ids) < batch_size and prod(pad([joined], p)) <= caps[p][len(ids)]):
            pieces.append(Piece(ids=tuple(ids), sp_size=size))
            ids, joined = [], tuple(row)
        ids.append(i)
        size, largest = p, joined
    return [*pieces, Piece(ids=tuple(ids), sp_size=size)]


def _caps(shapes: IntArray, sp_size: int, batch_size: int, rule: MemoryRule) -> list[int]:
    """Most padded tokens per sample with which 1, 2, ... ``batch_size`` samples fit together; 0 if none."""
    longest = int(padded_tokens(shapes.max(axis=0), sp_size))
    found = np.unique([*padded_tokens(shapes, sp_size).tolist(), longest])
    if len(found) > _MOST_SIZES:
        found = found[np.linspace(0, len(found) - 1, _MOST_SIZES).astype(np.int64)]
    fitting = rule.fits(sp_size, np.arange(1, batch_size + 1)[:, None], found[None, :])
    counts = fitting.sum(axis=1)
    return [int(found[n - 1]) if n else 0 for n in counts.tolist()]


def rounds_of(pieces: Iterable[Piece], world: World, spare: Piece) -> list[list[Assignment]]:
    """Put pieces on the world's groups, the earliest first; what does not fit beside it waits for the next round.

    Args:
        pieces: in the order of evaluation.
        world: its groups.
        spare: a short sample for ranks that are left over.
    """
    waiting: dict[int, deque[tuple[int, Piece]]] = {}
    for number, piece in enumerate(pieces):
        waiting.setdefault(piece.sp_size, deque()).append((number, piece))
    family = Family(world)
    rounds = []
    while waiting:
        free = FreeGroups(family)
        placed = _place(waiting, free)
        if not waiting:
            placed, free = _split(placed, family)
        rounds.append([*placed, *_copies(free, family, spare)])
    return rounds


def _place(waiting: dict[int, deque[tuple[int, Piece]]], free: FreeGroups) -> list[Assignment]:
    placed: list[Assignment] = []
    fitting = set(waiting)
    while fitting:
        size = min(fitting, key=lambda p: waiting[p][0][0])
        first = free.take(size, lead=size == max(waiting))
        if first is None:
            fitting.discard(size)
            continue
        _, piece = waiting[size].popleft()
        placed.append(Assignment(ids=piece.ids, first_rank=first, sp_size=size))
        if not waiting[size]:
            del waiting[size]
            fitting.discard(size)
    return placed


def _split(placed: Sequence[Assignment], family: Family) -> tuple[list[Assignment], FreeGroups]:
    """Halve micro-batches of the last round as long as there are free groups for the halves."""
    parts = sorted(placed, key=lambda a: (-a.sp_size, a.ids))
    while True:
        free = FreeGroups(family)
        seated = [replace(a, first_rank=free.taken(a.sp_size)) for a in parts]
        dividing = [i for i, a in enumerate(parts) if len(a.ids) > 1 and free.has(a.sp_size)]
        if not dividing:
            return seated, free
        at = max(dividing, key=lambda i: len(parts[i].ids))
        part, half = parts[at], -(-len(parts[at].ids) // 2)
        parts[at : at + 1] = [replace(part, ids=part.ids[:half]), replace(part, ids=part.ids[half:])]


def _copies(free: FreeGroups, family: Family, spare: Piece) -> list[Assignment]:
    """Something for the ranks that are left over, on groups of the size that the spare sample needs, or less."""
    found = []
    for size in family.sizes:
        while size <= spare.sp_size and free.has(size):
            found.append(Assignment(ids=spare.ids, first_rank=free.taken(size), sp_size=size, is_copy=True))
    return found
