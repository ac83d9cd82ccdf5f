"""Bringing the parts that the ranks hold together in the memory of rank 0, a bucket at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.agreement import of_all_ranks, raise_together
from lightning_dcp.checkpoint.shards import Fragment, Shard

BUCKET_BYTES = 64 * 2**20
"""What rank 0 holds on its device while it gathers, over all ranks; another rank needs nothing beside its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where parts go: this rank, the others, and the device that they talk over.

    Attributes:
        rank: global rank of this process.
        world_size: number of ranks.
        device: what their collectives work on.
        bucket_bytes: see :data:`BUCKET_BYTES`.
    """

    rank: int
    world_size: int
    device: torch.device
    bucket_bytes: int = BUCKET_BYTES


def gather_fragments(shard: Shard, route: Route) -> list[tuple[Fragment, ...]]:
    """What each rank holds of a group, in rank order, on every rank; one small gather, called by every rank."""
    return of_all_ranks(shard.fragments, route.world_size)


def gather_whole(
    flat: Tensor, shapes: Mapping[str, torch.Size], held: Sequence[tuple[Fragment, ...]], route: Route
) -> dict[str, Tensor]:
    """Put a group's flat tensor together by parameter, in the CPU memory of rank 0; called by every rank.

    Args:
        flat: this rank's part ``[n]``, equally long on all ranks: masters, or one kind of the optimizer's state.
        shapes: shape of each parameter of the group.
        held: see :func:`gather_fragments`.
        route: this rank and the others.

    Returns:
        One tensor for each parameter, on rank 0; nothing elsewhere.

    Raises:
        RuntimeError, MemoryError: on rank 0, which has too little memory; ``StepError`` elsewhere.
    """
    whole: dict[str, Tensor] = {}
    room: list[Tensor] = []
    error = None
    if route.rank == 0:
        try:
            _check_complete(shapes, held)
            whole = {name: torch.empty(shape, dtype=flat.dtype) for name, shape in shapes.items()}
            room = _room(flat, route)
        except Exception as raised:
            error = raised
    # Before the first bucket: the others would wait in it for a rank 0 that has given up.
    raise_together(error, route.world_size, "making room for a checkpoint")
    for start, pieces in _buckets(flat, room, route):
        for fragments, piece in zip(held, pieces, strict=False):
            for fragment, begin, end in _overlaps(fragments, start, start + len(piece)):
                place = fragment.place + begin - fragment.start
                target = whole[fragment.name].view(-1)[place : place + end - begin]
                target.copy_(piece[begin - start : end - start])
    return whole


def _check_complete(shapes: Mapping[str, torch.Size], held: Sequence[tuple[Fragment, ...]]) -> None:
    found = dict.fromkeys(shapes, 0)
    for fragment in chain.from_iterable(held):
        found[fragment.name] += fragment.length
    wrong = [name for name, shape in shapes.items() if found[name] != shape.numel()]
    if wrong:
        raise RuntimeError(
            f"the ranks hold {found[wrong[0]]} of the {shapes[wrong[0]].numel()} elements of {wrong[0]} "
            f"({len(wrong)} such parameters); DeepSpeed divides them otherwise than it is known here. Nothing was saved"
        )


def _size(flat: Tensor, route: Route) -> int:
    return max(1, route.bucket_bytes // (flat.element_size() * route.world_size))


def _room(flat: Tensor, route: Route) -> list[Tensor]:
    """What rank 0 receives a bucket in, a piece from each rank."""
    if route.world_size == 1:
        return []
    size = min(len(flat), _size(flat, route))
    return [flat.new_empty(size, device=route.device) for _ in range(route.world_size)]


def _buckets(flat: Tensor, room: Sequence[Tensor], route: Route) -> Iterator[tuple[int, list[Tensor]]]:
    """The same stretch of every rank's part, one stretch after the other; the pieces are there on rank 0 only."""
    size = _size(flat, route)
    flat = flat.detach()
    if route.world_size == 1:
        yield from ((start, [flat[start : start + size]]) for start in range(0, len(flat), size))
        return
    for start in range(0, len(flat), size):
        piece = flat[start : start + size]
        if piece.device.type != route.device.type:
            # After the end of a fit the state lies on the CPU, where NCCL reaches nothing.
            piece = piece.to(route.device)
        pieces = [buffer[: len(piece)] for buffer in room]
        dist.gather(piece, pieces or None, dst=0)
        yield start, pieces


def _overlaps(fragments: Sequence[Fragment], start: int, end: int) -> Iterator[tuple[Fragment, int, int]]:
    """The fragments that a stretch of the partition touches, each with the bounds of what it touches."""
    first = max(0, bisect_right(fragments, start, key=lambda fragment: fragment.start) - 1)
    for fragment in fragments[first:]:
        if fragment.start >= end:
            return
        begin, stop = max(start, fragment.start), min(end, fragment.start + fragment.length)
        if begin < stop:
            yield fragment, begin, stop
