"""Handing out the ranks of a step to groups of different sizes, so that wide groups stay possible for long."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from lightning_dcp.topology import Block, World


class _Node(NamedTuple):
    """A block with the blocks right inside it and all sizes that it holds, its own included."""

    first_rank: int
    sp_size: int
    inside: list[_Node]
    sizes: tuple[int, ...]


class FreeBlocks:
    """Ranks that no batch has yet, as the widest free blocks of the world's laminar family.

    A block is cut out of the smallest free one that holds its size (a buddy allocator): what is left over stays as
    wide as it can.

    Attributes:
        ranks: number of ranks that are still free.
    """

    def __init__(self, world: World) -> None:
        self.ranks = world.world_size
        self._free: dict[tuple[int, tuple[int, ...]], list[tuple[int, _Node]]] = {}
        for root in _forest(world.blocks):
            self._add(root)

    def has(self, sp_size: int) -> bool:
        """Whether a block of this size is free."""
        return any(nodes and sp_size in sizes for (_, sizes), nodes in self._free.items())

    def take(self, sp_size: int) -> int:
        """Hand out a block of this size, the first of those that spoil least; gives its first rank.

        Raises:
            ValueError: none is free.
        """
        keys = [key for key, nodes in self._free.items() if nodes and sp_size in key[1]]
        if not keys:
            raise ValueError(f"no block of {sp_size} ranks is free")
        _, node = heapq.heappop(self._free[min(keys)])
        while node.sp_size > sp_size:
            holding = [child for child in node.inside if sp_size in child.sizes]
            chosen = min(holding, key=lambda child: (child.sp_size, child.first_rank))
            for child in node.inside:
                if child is not chosen:
                    self._add(child)
            node = chosen
        self.ranks -= sp_size
        return node.first_rank

    def _add(self, node: _Node) -> None:
        # Two free blocks never start at the same rank, so nodes are never compared.
        heapq.heappush(self._free.setdefault((node.sp_size, node.sizes), []), (node.first_rank, node))


def _forest(blocks: tuple[Block, ...]) -> list[_Node]:
    """The widest blocks with what they hold; single ranks are always among the blocks, so nothing is left out."""
    roots: list[_Node] = []
    path: list[tuple[Block, list[_Node]]] = []
    for first, size in [*sorted(blocks, key=lambda block: (block[0], -block[1])), (1 << 62, 1)]:
        while path and first >= path[-1][0][0] + path[-1][0][1]:
            (start, width), inside = path.pop()
            sizes = tuple(sorted({width, *(p for child in inside for p in child.sizes)}))
            siblings = path[-1][1] if path else roots
            siblings.append(_Node(start, width, inside, sizes))
        path.append(((first, size), []))
    return roots
