"""Keeping profiles: what they were measured for, files, and when one may be used again."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.recompute import RecomputeSwitch

T = TypeVar("T")

FORMAT_VERSION = "2"
"""Raised when the way of measuring changes, so that older profiles are not used again."""


def profile_identity(
    module: nn.Module, switch: RecomputeSwitch, *, world_size: int, precision: str, device: torch.device
) -> dict[str, str]:
    """What the numbers of a profile depend on, as this rank sees it; see :func:`same_for_all`.

    Args:
        module: the model after ``deepspeed.initialize``.
        switch: the switch over its repeated layers.
        world_size: number of ranks.
        precision: as given to the Trainer.
        device: device of this rank.
    """
    model = hashlib.blake2b(type(module).__qualname__.encode(), digest_size=8)
    for name, p in module.named_parameters():
        model.update(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}".encode())
    layers = hashlib.blake2b(digest_size=8)
    for family in switch.families:
        layers.update(family.fingerprint.encode())
    names = ", ".join(f"{family.name} x {len(family.layers)}" for family in switch.families) or "none"
    return {
        "model": f"{type(module).__qualname__} {model.hexdigest()}",
        "layers": f"{names} {layers.hexdigest()}",
        "device": _device_name(device),
        "world_size": str(world_size),
        "precision": precision,
        "torch": torch.__version__,
        "format": FORMAT_VERSION,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{device.type}: {name}, {torch.get_num_threads()} threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a profile must have been measured for to be used.

    Attributes:
        identity: see :func:`profile_identity`.
        max_tokens: tokens of the longest sample that it must reach.
    """

    identity: Mapping[str, str]
    max_tokens: int

    def check(self, profile: Profile, source: str) -> Profile:
        """The profile itself.

        A profile without any identity was made by hand (from a formula) and is taken for every run.

        Raises:
            ProfileError: it does not fit; the message names the fields, as ``field: in the profile / here``.
        """
        reasons = profile.differing(self.identity) if profile.identity else []
        if profile.max_tokens < self.max_tokens:
            reasons.append(f"longest sample in tokens: {profile.max_tokens} / {self.max_tokens}")
        if reasons:
            raise ProfileError(
                f"{source} was measured for something else: {'; '.join(reasons)} (in the profile / in this run). "
                "Delete it or name another file to measure anew"
            )
        return profile


def load_or_measure(path: Path, wanted: Wanted, measure: Callable[[], Profile], *, rank: int) -> Profile:
    """The profile in a file, or a new one that is written there; called by every rank.

    Collectives: one broadcast of the file's text from rank 0, so that all ranks decide alike, and those of
    ``measure``. Only rank 0 touches the file; it appears complete or not at all. Where it cannot be written the run
    goes on with a warning: the profile was measured, and an error of one rank would leave the others waiting.

    Args:
        path: the file.
        wanted: what the profile must fit; equal on all ranks.
        measure: measures a new profile; called by all ranks or by none.
        rank: global rank of this process.

    Raises:
        ProfileError: on all ranks: the file cannot be read, is damaged, or does not fit.
    """
    kept = kept_profile(path, rank=rank)
    if kept is not None:
        return wanted.check(kept, str(path))
    profile = measure()
    if rank == 0:
        try:
            write_profile(profile, path)
        except OSError as error:
            rank_zero_warn(f"The profile could not be kept in {path} ({error}); the next run measures anew")
    return profile


def kept_profile(path: Path, *, rank: int) -> Profile | None:
    """The profile in a file, if there is one; called by every rank, with one broadcast of the text from rank 0.

    Args:
        path: the file.
        rank: global rank of this process.

    Raises:
        ProfileError: on all ranks: the file cannot be read, or is damaged.
    """
    text, error = _broadcast(_read(path) if rank == 0 else (None, None))
    if error is not None:
        raise ProfileError(f"{path} cannot be read: {error}")
    return None if text is None else _parse(text, path)


def same_for_all(identity: Mapping[str, str]) -> dict[str, str]:
    """The identity of rank 0, by one broadcast: ranks on unequal hardware must not decide each for itself."""
    return _broadcast(dict(identity))


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile so that a reader finds either the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(profile.to_json())
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner only.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _parse(text: str, path: Path) -> Profile:
    try:
        return Profile.from_json(text)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def _read(path: Path) -> tuple[str | None, str | None]:
    """Text of the file and what went wrong; neither if there is no file."""
    try:
        return path.read_text(), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)


def _broadcast(value: T) -> T:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
