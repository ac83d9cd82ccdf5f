"""Which profile says how much memory an evaluation needs, where no fit has just measured one."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.preparation import Settings
from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.profiling.store import kept_profile, profile_identity, same_for_all
from lightning_dcp.recompute import RecomputeSwitch, find_families


def usable_profile(
    settings: Settings, known: Profile | None, trainer: pl.Trainer, device: torch.device
) -> Profile | None:
    """The profile that was given or kept in a file, or else the known one, if it is of this model; for every rank.

    Collectives: at most two broadcasts, of the file's text and of what the profile has to fit.

    Args:
        settings: the strategy's own arguments.
        known: that of the checkpoint or of the last fit.
        trainer: of the evaluation.
        device: of this rank.
    """
    module, given = trainer.lightning_module, settings.profile
    profile = given if isinstance(given, Profile) else _kept(given, trainer.global_rank) or known
    if profile is None:
        return None
    switch = RecomputeSwitch(find_families(module, settings.layers))
    identity = profile_identity(
        module, switch, world_size=trainer.world_size, precision=str(trainer.precision), device=device
    )
    differing = profile.differing(same_for_all(identity)) if profile.identity else []
    if profile.num_layers != switch.num_layers:
        differing.append(f"num_layers: {profile.num_layers} / {switch.num_layers}")
    if not differing:
        return profile
    rank_zero_info(
        "The profile at hand was measured for something else, so every sample is evaluated on one rank. Differs "
        f"(profile / here): {'; '.join(differing)}"
    )
    return None


def _kept(path: str | Path | None, rank: int) -> Profile | None:
    """What rank 0 finds in the file that profiles are kept in."""
    try:
        return None if path is None else kept_profile(Path(path), rank=rank)
    except ProfileError as error:
        rank_zero_warn(f"The kept profile is not used to evaluate: {error}")
        return None
