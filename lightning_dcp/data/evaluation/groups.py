"""Which groups of the world's family are free in a round."""

from __future__ import annotations

from lightning_dcp.topology import Block, World


class Family:
    """The groups of a world and which of them lie directly inside which.

    Args:
        world: its blocks are nested or disjoint and cover every rank.
    """

    def __init__(self, world: World) -> None:
        self.sizes = tuple(reversed(world.sp_sizes))
        self.roots: list[Block] = []
        self.children: dict[Block, list[Block]] = {block: [] for block in world.blocks}
        self.held: dict[Block, set[int]] = {block: {block[1]} for block in world.blocks}
        innermost: dict[int, Block] = {}
        for block in world.blocks:  # widest first, so what holds a block was seen before it
            parent = innermost.get(block[0])
            (self.roots if parent is None else self.children[parent]).append(block)
            innermost.update(dict.fromkeys(range(block[0], sum(block)), block))
        for block in reversed(world.blocks):
            for child in self.children[block]:
                self.held[block] |= self.held[child]


class FreeGroups:
    """The groups of a family that nobody uses yet.

    A group is cut from the smallest free block that holds one of its size, so that wide blocks stay whole.

    Args:
        family: see :class:`Family`.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._free = set(family.roots)

    def has(self, size: int) -> bool:
        """Whether a group of this size is free."""
        return any(size in self._family.held[block] for block in self._free)

    def taken(self, size: int) -> int:
        """:meth:`take` where a group is known to be free; those of one size come by rank."""
        first = self.take(size, lead=True)
        assert first is not None, f"no group of {size} ranks is free"
        return first

    def take(self, size: int, *, lead: bool) -> int | None:
        """Use a free group and give its first rank; ``None`` where none is free.

        Args:
            size: ranks of the group.
            lead: prefer the one at rank 0, whose logger and progress bar then see samples that count.
        """
        holders = [block for block in self._free if size in self._family.held[block]]
        first = [block for block in holders if lead and block[0] == 0]
        holder = min(first or holders, key=lambda block: (block[1], block[0]), default=None)
        if holder is None:
            return None
        self._free.discard(holder)
        while holder[1] != size:
            parts = self._family.children[holder]
            self._free.update(parts)
            holder = min(
                (b for b in parts if size in self._family.held[b]), key=lambda block: (block[1], block[0])
            )
            self._free.discard(holder)
        return holder[0]
