"""What a checkpoint carries of a run besides weights and optimizer: data, profile, settings, random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.planners import Planner
from lightning_dcp.preparation import Settings
from lightning_dcp.profile import Profile

VERSION = 1

_NOT_OF_PLANS = ("profile", "self_check")
"""Settings that change no plan by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Our part of a checkpoint, of plain values only.

    Attributes:
        world_size: ranks of the run that wrote it.
        profile: the profile that it planned with.
        settings: what its plans depended on besides, see :func:`plan_settings`.
        loader: state of the train loader: independent of ranks, planner and profile.
        random: the random numbers of each rank, see :mod:`lightning_dcp.checkpoint.randomness`.
    """

    KEY: ClassVar[str] = "lightning_dcp"

    world_size: int
    profile: Profile
    loader: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    random: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "profile": self.profile.to_json(),
            "settings": self.settings,
            "loader": self.loader,
            "random": self.random,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Section:
        """Read :meth:`to_dict` back.

        Raises:
            MisconfigurationException: a later version wrote it, or it is damaged.
        """
        if not isinstance(content, dict):
            raise _damaged(f"it is a {type(content).__name__}")
        if content.get("version") != VERSION:
            raise MisconfigurationException(
                f"The checkpoint's part {cls.KEY!r} has version {content.get('version')}; this lightning_dcp reads "
                f"version {VERSION}. Resume with the lightning_dcp that wrote it, or start from the weights alone "
                "with load_from_checkpoint"
            )
        try:
            return cls(
                world_size=int(content["world_size"]),
                profile=Profile.from_json(content["profile"]),
                settings=dict(content["settings"]),
                loader=dict(content["loader"]),
                random=list(content["random"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(f"{type(error).__name__}: {error}") from error


def _damaged(how: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"The checkpoint's part {Section.KEY!r} is damaged ({how}). Resume from another checkpoint, or start from the "
        "weights alone with load_from_checkpoint"
    )


def plan_settings(settings: Settings) -> dict[str, Any]:
    """What steps and their plans depend on besides profile, ranks and data, as plain values by name."""
    names = [f.name for f in dataclasses.fields(settings) if f.name not in _NOT_OF_PLANS]
    found = {name: getattr(settings, name) for name in names}
    planner, loss = found.pop("planner"), found.pop("loss")
    options = {f"planner.{name}": value for name, value in _options(planner).items()}
    found |= {"loss_weighting": loss.weighting, "loss_reduction": loss.reduction}
    return {name: _plain(value) for name, value in {"planner": planner.name, **options, **found}.items()}


def _options(planner: Planner) -> dict[str, Any]:
    if dataclasses.is_dataclass(planner):
        return {f.name: getattr(planner, f.name) for f in dataclasses.fields(planner) if f.init}
    attributes: dict[str, Any] = getattr(planner, "__dict__", {})
    return {name: value for name, value in attributes.items() if not name.startswith("_") and name != "name"}


def _plain(value: Any) -> Any:
    """A value that any version of torch.load reads, and that equals itself when it is read again."""
    # Subclasses (NumPy's float64, enumerations) are written by their type's name, which a careful reader refuses.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum | np.generic):
        return _plain(value.value if isinstance(value, Enum) else value.item())
    if isinstance(value, np.ndarray):
        return value.tolist()
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def warn_of_changes(section: Section, settings: Settings, world_size: int) -> None:
    """Name what of a resumed run is set otherwise than it was; the run goes on with its own settings."""
    then = {"ranks": section.world_size, **section.settings}
    now = {"ranks": world_size, **plan_settings(settings)}
    if isinstance(settings.profile, Profile) and settings.profile != section.profile:
        then["profile"], now["profile"] = "of the checkpoint", "given"
    changed = [
        f"{name}: {then.get(name, '-')} / {now.get(name, '-')}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name, "-") != now.get(name, "-")
    ]
    if changed:
        rank_zero_warn(
            "The run was started with other settings than the one that wrote the checkpoint, and goes on with its own; "
            f"the samples to come are the same. Changed (checkpoint / now): {'; '.join(changed)}"
        )


def resumed_profile(section: Section, identity: Mapping[str, str], longest: int) -> Profile | None:
    """The checkpoint's profile, where model, hardware and ranks are those of this run and the samples no longer.

    Equal profiles give equal plans, so the resumed run is bit-equal. Otherwise a new one is needed; the samples to
    come are the same, only the plans differ.

    Args:
        section: of the checkpoint.
        identity: of this run. A profile without any identity was made by hand and is taken for every run.
        longest: tokens of the longest sample.
    """
    profile = section.profile
    reasons = profile.differing(identity) if profile.identity else []
    if profile.max_tokens < longest:
        reasons.append(f"longest sample in tokens: {profile.max_tokens} / {longest}")
    if not reasons:
        return profile
    rank_zero_warn(
        "The checkpoint's profile was measured for something else, so plans are made with a new one and the resumed "
        f"run equals the uninterrupted one up to rounding. Differs (checkpoint / now): {'; '.join(reasons)}"
    )
    return None
