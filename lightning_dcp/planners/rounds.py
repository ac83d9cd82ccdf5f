"""Micro-batches in rounds: where they go, and a local search over where the sorted samples are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lightning_dcp.cost import INFEASIBLE
from lightning_dcp.topology import World

Clock = Callable[[int, int, int], int]
"""Nanoseconds of ``(start, batch_size, sp_size)``."""


class Piece(NamedTuple):
    """The ``batch_size`` samples from ``start`` on, longest first, as one micro-batch."""

    start: int
    batch_size: int
    sp_size: int
    nanoseconds: int


Placed = tuple[int, list[tuple[Piece, int]]]
"""The sum of the rounds, and each micro-batch with its first rank."""


def slots(pieces: list[Piece]) -> int:
    """Ranks times rounds that micro-batches take."""
    return sum(piece.sp_size for piece in pieces)


def place(world: World, pieces: list[Piece]) -> Placed:
    """Give each micro-batch a group, where it adds least to the sum of the rounds."""
    rounds: list[int] = []
    placed: list[tuple[Piece, int]] = []
    done = [0] * world.world_size
    for p in sorted({piece.sp_size for piece in pieces}, reverse=True):
        mine = sorted((piece for piece in pieces if piece.sp_size == p), key=lambda piece: -piece.nanoseconds)
        # Blocks by the round in which they are free; wider groups leave all ranks of a block in the same one.
        free: dict[int, list[int]] = {}
        for first, _ in reversed(world.blocks_of(p)):
            free.setdefault(done[first], []).append(first)
        for piece in mine:
            number = min(
                free, key=lambda k: (max(piece.nanoseconds - (rounds[k] if k < len(rounds) else 0), 0), k)
            )
            first = free[number].pop()
            if not free[number]:
                del free[number]
            free.setdefault(number + 1, []).append(first)
            done[first : first + p] = [number + 1] * p
            if number == len(rounds):
                rounds.append(0)
            rounds[number] = max(rounds[number], piece.nanoseconds)
            placed.append((piece, first))
    return sum(rounds), placed


def polish(world: World, pieces: list[Piece], clock: Clock, max_moves: int) -> Placed:
    """Move the cuts between micro-batches, join and divide them, as long as the sum of the rounds falls.

    Args:
        world: ranks and groups.
        pieces: micro-batches by ``start``.
        clock: their times.
        max_moves: most changes that are tried without success, one after the other.
    """
    best, seen = place(world, pieces), 0
    # A change of a large step takes longer to try and gains less.
    max_moves = max_moves * 128 // max(len(pieces), 128)
    while (found := _better(world, pieces, best[0], clock, max_moves, seen)) is not None:
        pieces, best, seen = found
    return best


def _better(
    world: World, pieces: list[Piece], least: int, clock: Clock, max_moves: int, first: int
) -> tuple[list[Piece], Placed, int] | None:
    """The first change that brings the sum of the rounds below ``least``, and where it was made."""
    tried = 0
    for index in _turn(pieces, first):
        if tried >= max_moves:
            break
        for candidate in _changes(pieces, index, clock):
            tried += 1
            placed = place(world, candidate)
            if placed[0] < least:
                return candidate, placed, index
    return None


def _turn(pieces: list[Piece], first: int) -> Iterator[int]:
    """All indices once, from ``first`` on, so that a change does not start the search anew at the front."""
    count = len(pieces)
    return ((first + k) % count for k in range(count))


def _changes(pieces: list[Piece], index: int, clock: Clock) -> Iterator[list[Piece]]:
    """The micro-batch and the one behind it cut elsewhere or joined; the micro-batch divided."""
    piece = pieces[index]
    before, behind = pieces[:index], pieces[index + 1 :]

    def remade(*parts: tuple[int, int, int]) -> list[Piece] | None:
        made = [Piece(*part, clock(*part)) for part in parts]
        return made if all(part.nanoseconds < INFEASIBLE for part in made) else None

    start, size, p = piece[:3]
    options = []
    if behind and behind[0].sp_size == p:
        total = size + behind[0].batch_size
        cuts = {size - size // 2, size - 1, size + 1, size + behind[0].batch_size // 2}
        options += [
            (remade((start, cut, p), (start + cut, total - cut, p)), behind[1:])
            for cut in sorted(cuts)
            if 0 < cut < total and cut != size
        ]
        options.append((remade((start, total, p)), behind[1:]))
    if size > 1:
        options.append((remade((start, size // 2, p), (start + size // 2, size - size // 2, p)), behind))
    for made, rest in options:
        if made is not None:
            yield [*before, *made, *rest]
