"""The machines that a simulation runs on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.plan import MAX_WORLD_SIZE
from lightning_dcp.planners import Limits, PlanRequest
from lightning_dcp.profile import Profile
from lightning_dcp.topology import World, nested_sizes

RANKS_PER_NODE = 8
"""Ranks that share a node where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """A virtual cluster.

    Attributes:
        cost: predicted times and bytes; its profile also says what ends every step (``sync_time``).
        world: ranks and groups.
        limits: what a plan must respect.
    """

    cost: CostModel
    world: World
    limits: Limits

    @classmethod
    def build(
        cls,
        profile: Profile,
        world_size: int,
        *,
        memory_bytes: int,
        sp_sizes: Iterable[int] | None = None,
        ranks_per_node: int = RANKS_PER_NODE,
        **limits: Any,
    ) -> Cluster:
        """A cluster of ``world_size`` ranks that behaves like the profile.

        Args:
            profile: measured or analytic.
            world_size: number of ranks ``W``.
            memory_bytes: limit per rank.
            sp_sizes: sequence-parallel sizes that may be used; by default the longest chain of profiled sizes up to
                ``world_size`` that divide one another.
            ranks_per_node: ranks that share a node.
            limits: the other fields of :class:`~lightning_dcp.planners.Limits`.

        Raises:
            ValueError: a number is out of range, or a size was not profiled.
        """
        for name, value in (("world_size", world_size), ("ranks_per_node", ranks_per_node)):
            if not 1 <= value <= MAX_WORLD_SIZE:
                raise ValueError(f"{name} is {value}; allowed are 1 to {MAX_WORLD_SIZE}")
        cost = CostModel(profile)
        possible = [p for p in cost.sp_sizes if p <= world_size]
        if not possible:
            raise ValueError(
                f"world_size is {world_size}, and the profile starts at sequence-parallel size {cost.sp_sizes[0]}; "
                "use as many ranks, or a profile with smaller sizes"
            )
        sizes = nested_sizes(possible) if sp_sizes is None else tuple(sorted(set(sp_sizes)))
        if not sizes or not {*sizes} <= {1, *possible}:
            raise ValueError(
                f"sp_sizes is {sizes}; allowed for {world_size} ranks and this profile are {possible}"
            )
        return cls(
            cost=cost,
            world=World.build(world_size, sizes, ranks_per_node),
            limits=Limits(memory_bytes=memory_bytes, **limits),
        )

    def request(self, sample_ids: IntArray, shapes: IntArray) -> PlanRequest:
        """What a planner is asked for these samples on this cluster; sizes ``[n, axes]``."""
        return PlanRequest(
            sample_ids=sample_ids, shapes=shapes, cost=self.cost, world=self.world, limits=self.limits
        )
