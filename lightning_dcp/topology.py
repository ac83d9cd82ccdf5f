"""Which groups of ranks may work together: legal sequence-parallel sizes and the laminar family of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Block = tuple[int, int]
"""``(first_rank, sp_size)``: the ranks ``first_rank .. first_rank + sp_size - 1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run and the groups that a planner may use.

    Attributes:
        world_size: number of ranks ``W``.
        ranks_per_node: ranks that share a node; groups of at most this size stay inside one node.
        blocks: laminar family of groups, widest first; every single rank is one of them.
    """

    world_size: int
    ranks_per_node: int
    blocks: tuple[Block, ...]

    @classmethod
    def build(cls, world_size: int, sp_sizes: Iterable[int], ranks_per_node: int | None = None) -> World:
        """Lay out the family for the sequence-parallel sizes that the model and the user allow."""
        per_node = min(world_size if ranks_per_node is None else ranks_per_node, world_size)
        return cls(
            world_size=world_size,
            ranks_per_node=per_node,
            blocks=laminar_blocks(world_size, sp_sizes, per_node),
        )

    def restricted(self, sp_sizes: Iterable[int]) -> World:
        """The same world without the groups of other sizes; its process groups exist already."""
        allowed = {1, *sp_sizes}
        return replace(self, blocks=tuple(block for block in self.blocks if block[1] in allowed))

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """Sizes that occur in :attr:`blocks`, ascending; always starts with 1."""
        return tuple(sorted({size for _, size in self.blocks}))

    def blocks_of(self, sp_size: int) -> tuple[Block, ...]:
        """Groups of one size, by first rank."""
        return tuple(block for block in self.blocks if block[1] == sp_size)


def legal_sp_sizes(world_size: int, num_heads: int, num_kv_heads: int | None = None) -> tuple[int, ...]:
    """Sizes ``p <= W`` that the attention heads allow: ``p | heads`` and (``p | kv_heads`` or ``kv_heads | p``).

    Raises:
        ValueError: a count is below one.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if min(world_size, num_heads, kv_heads) < 1:
        raise ValueError(
            f"world size {world_size}, heads {num_heads}, key/value heads {kv_heads}: each must be at least 1"
        )
    return tuple(
        p for p in range(1, world_size + 1) if num_heads % p == 0 and (kv_heads % p == 0 or p % kv_heads == 0)
    )


def nested_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """The most of these sizes that divide one another in turn, ascending; of equally many the smallest.

    Sizes that do not divide each other crowd each other out of the laminar family: sizes 1, 2, 3, 4 leave four
    ranks a single pair. ``(1, 2, 3, 4, 6, 8, 12)`` gives ``(1, 2, 4, 8)``.
    """
    chains: list[tuple[int, ...]] = []
    for size in sorted({1, *sizes}):
        below = [chain for chain in chains if size % chain[-1] == 0]
        chains.append((*min(below, key=lambda chain: (-len(chain), chain), default=()), size))
    return min(chains, key=lambda chain: (-len(chain), chain))


def laminar_blocks(world_size: int, sp_sizes: Iterable[int], ranks_per_node: int) -> tuple[Block, ...]:
    """Nested or disjoint groups that cover every rank, widest first (design of the group family).

    From the largest size down, as many aligned blocks as fit into each region, the rest of the region split
    likewise: ``W = 6`` and sizes 1, 2, 4 give ``{0-3}, {4,5}``, pairs, single ranks. Sizes up to
    ``ranks_per_node`` are laid out inside each node, wider ones over whole nodes.

    Raises:
        ValueError: a size is below one or above ``world_size``, or ``ranks_per_node`` is below one.
    """
    sizes = sorted({1, *sp_sizes}, reverse=True)
    if ranks_per_node < 1 or sizes[-1] < 1 or sizes[0] > world_size:
        raise ValueError(
            f"sizes {sizes[::-1]} with {ranks_per_node} ranks per node do not fit a world of {world_size} ranks; "
            "each must lie between 1 and the world size"
        )
    wide = [p for p in sizes if p > ranks_per_node and p % ranks_per_node == 0]
    narrow = [p for p in sizes if p <= ranks_per_node]
    found: set[Block] = set()
    _split(0, world_size, wide, found)
    for start in range(0, world_size, ranks_per_node):
        _split(start, min(ranks_per_node, world_size - start), narrow, found)
    return tuple(sorted(found, key=lambda block: (-block[1], block[0])))


def _split(start: int, length: int, sizes: list[int], found: set[Block]) -> None:
    """Fill ``start .. start + length - 1`` with blocks of the largest size that fits, then split each block."""
    while sizes and sizes[0] > length:
        sizes = sizes[1:]
    if not sizes:
        return
    size, smaller = sizes[0], sizes[1:]
    whole = length // size
    for index in range(whole):
        found.add((start + index * size, size))
        _split(start + index * size, size, smaller, found)
    _split(start + whole * size, length - whole * size, smaller, found)
