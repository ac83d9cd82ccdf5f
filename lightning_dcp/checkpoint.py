"""What a checkpoint carries besides weights and optimizer state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray
from lightning_dcp.profile import Profile

RANKS_FILE = "lightning_dcp.json"


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


def write_ranks(folder: str | Path, world_size: int) -> None:
    """Note beside a checkpoint how many ranks wrote it; called by rank 0."""
    Path(folder, RANKS_FILE).write_text(json.dumps({"world_size": world_size}))


def check_ranks(folder: str | Path, world_size: int) -> None:
    """Refuse a checkpoint whose optimizer state is divided over another number of ranks.

    Called by every rank before anything is loaded; a checkpoint without the note is left to DeepSpeed.

    Raises:
        MisconfigurationException: with both numbers and what to do.
    """
    try:
        written = json.loads(Path(folder, RANKS_FILE).read_text())["world_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if written != world_size:
        raise MisconfigurationException(
            f"{folder} was written by {written} ranks and cannot be resumed on {world_size}: the optimizer state is "
            f"stored in {written} parts. Resume on {written} ranks"
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
