"""What a checkpoint carries besides weights and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Our part of a checkpoint, of plain values only.

    Attributes:
        world_size: ranks of the run that wrote it.
        profile: the profile that it planned with.
        loader: state of the train loader: independent of ranks, planner and profile.
    """

    KEY: ClassVar[str] = "lightning_dcp"

    world_size: int
    profile: Profile
    loader: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"world_size": self.world_size, "profile": self.profile.to_json(), "loader": self.loader}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Section:
        """Read :meth:`to_dict` back.

        Raises:
            ProfileError: the profile is damaged.
        """
        return cls(
            world_size=int(content["world_size"]),
            profile=Profile.from_json(content["profile"]),
            loader=dict(content["loader"]),
        )


def resumed_profile(section: Section, fresh: Profile, shapes: IntArray) -> Profile:
    """The profile to continue with: the checkpoint's where model, hardware and ranks are those of this run.

    Equal profiles give equal plans, so the resumed run is bit-equal. Otherwise the fresh one is used; the samples
    to come are the same, only the plans differ.
    """
    differing = section.profile.differing(fresh.identity)
    if not differing and section.profile.max_tokens >= int(shapes.prod(axis=1).max()):
        return section.profile
    rank_zero_warn(
        "The checkpoint's profile was measured for something else, so plans are made with a new one and the resumed "
        "run equals the uninterrupted one up to rounding. Differs (checkpoint / now): "
        + ("; ".join(differing) or "the longest sample")
    )
    return fresh
