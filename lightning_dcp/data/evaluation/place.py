"""What a source of evaluation items has to know of the run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.data.evaluation.rounds import MemoryRule
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where items are evaluated.

    Attributes:
        rank: global rank.
        world: the ranks and the groups that may be used.
        rule: what fits the memory; without one every group has one rank.
        seed: of what a user's own loader and sampler draw.
        in_order: leave a random order of samples out, as ``overfit_batches`` asks for.
        predicting: predictions are made, so that copies need not be run.
    """

    rank: int
    world: World
    rule: MemoryRule | None = None
    seed: int = 0
    in_order: bool = False
    predicting: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks ``W``."""
        return self.world.world_size
