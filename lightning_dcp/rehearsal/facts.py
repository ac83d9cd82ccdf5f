"""What a dry run finds out, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from lightning_dcp.agreement import raise_together
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.protocol import Limits
from lightning_dcp.preparation import Prepared, watch_attention
from lightning_dcp.profile import Profile
from lightning_dcp.recompute import LayerFamily
from lightning_dcp.recompute.families import class_of
from lightning_dcp.rehearsal.text import text_of
from lightning_dcp.sequence_parallel.interception import AttentionRecorder
from lightning_dcp.strategy import DCPStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Repeated layers of the model.

    Attributes:
        name: path of the list that they stand in, or the class that they were named by.
        class_name: class of a layer.
        layers: how many there are.
        parameters: of all of them.
    """

    name: str
    class_name: str
    layers: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a fit would start with; equal on all ranks but for ``profile_from``, which is that of rank 0's disk.

    Attributes:
        world_size: ranks.
        device: kind of this rank's device, on CUDA its name.
        precision: as given to the Trainer.
        families: repeated layers; their recomputation is what plans choose.
        heads: pairs (heads, key/value heads) of the attention calls that were seen.
        kernels: kernels of the exchanged attention, with the reason.
        sp_sizes: sequence-parallel sizes that plans use.
        left_out: reason, and the sizes that are not used for it.
        self_check: as it was asked for.
        exact_shapes: the self-check found that padding changes the result.
        recompute: the self-check found that layers may be recomputed.
        findings: what it switched off, or could not check, and why.
        limits: limits of all plans; ``memory_bytes`` is that of a rank.
        profile: time and memory by length and size.
        profile_from: where it came from.
        planner: name of the planner.
        plans: of the first steps.
        num_samples: samples of an epoch.
        num_tokens: their tokens.
        num_steps: steps of an epoch; ``None`` where they are known only when they are planned.
    """

    world_size: int
    device: str
    precision: str
    families: tuple[Family, ...]
    heads: tuple[tuple[int, int], ...]
    kernels: tuple[str, ...]
    sp_sizes: tuple[int, ...]
    left_out: Mapping[str, tuple[int, ...]]
    self_check: bool | str
    exact_shapes: bool
    recompute: bool
    findings: tuple[str, ...]
    limits: Limits
    profile: Profile
    profile_from: str
    planner: str
    plans: tuple[IterationPlan, ...]
    num_samples: int
    num_tokens: int
    num_steps: int | None

    @property
    def steps_of_epoch(self) -> int:
        """Steps of an epoch, taken from the tokens of the first ones where the number is not known."""
        if self.num_steps is not None or not self.plans:
            return self.num_steps or 0
        return ceil(len(self.plans) * self.num_tokens / sum(plan.num_tokens for plan in self.plans))

    @property
    def seconds_of_epoch(self) -> float:
        """Seconds of an epoch by the profile: the first plans stand for all of its tokens."""
        planned = sum(plan.makespan for plan in self.plans) / max(sum(plan.num_tokens for plan in self.plans), 1)
        return (planned * self.num_tokens + self.steps_of_epoch * self.profile.sync_time) / 1e9

    def __str__(self) -> str:
        """All of it on a screen."""
        return text_of(self)


def collect(strategy: DCPStrategy, precision: str, steps: int) -> DryRun:
    """What ``setup()`` has found, and the plans of the first steps; called by every rank.

    Collectives: those of one agreement on errors.

    Args:
        strategy: after its ``setup()``.
        precision: as given to the Trainer.
        steps: how many plans to make.

    Raises:
        PlanError: a step cannot be planned.
    """
    prepared, loader = strategy.prepared, strategy.loader
    seen = _attention(strategy, prepared, loader)
    planning = prepared.planning(strategy.global_rank, strategy.profile)
    tokens = loader.shapes.prod(axis=1)
    left_out = len(loader.refused_ids), int(tokens[loader.refused_ids].sum())
    return DryRun(
        world_size=strategy.world_size,
        device=_device(strategy.root_device),
        precision=precision,
        families=tuple(_family(family) for family in prepared.runner.recompute.families),
        heads=tuple(sorted(seen.heads)),
        kernels=tuple(sorted(f"{kernel.name} ({kernel.reason})" for kernel in seen.backends)),
        sp_sizes=planning.world.sp_sizes,
        left_out=_left_out(prepared, planning.world.sp_sizes),
        self_check=prepared.settings.self_check,
        exact_shapes=prepared.freedoms.exact_shapes,
        recompute=prepared.freedoms.recompute,
        findings=prepared.freedoms.messages,
        limits=prepared.limits,
        profile=strategy.profile,
        profile_from=_origin(strategy, prepared),
        planner=strategy.planner.name,
        plans=tuple(loader.upcoming(steps)),
        num_samples=len(tokens) - left_out[0],
        num_tokens=int(tokens.sum()) - left_out[1],
        num_steps=_num_steps(loader),
    )


def _attention(strategy: DCPStrategy, prepared: Prepared, loader: DCPLoader) -> AttentionRecorder:
    """A forward of two short samples on every rank alone: setup() looks only where it has several ranks."""
    seen, error = AttentionRecorder(), None
    try:
        watch_attention(seen, strategy.global_rank, prepared.runner, loader.shapes, prepared.load)
    except Exception as raised:  # user code, which may fail on one rank only
        error = raised
    raise_together(error, strategy.world_size, "a forward of training_step")
    return seen


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _family(family: LayerFamily) -> Family:
    return Family(
        name=family.name,
        class_name=class_of(family.layers[0]).__name__,
        layers=len(family.layers),
        parameters=sum(p.numel() for layer in family.layers for p in layer.parameters()),
    )


def _left_out(prepared: Prepared, used: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Reasons of ``setup()``, and of what it has done with the sizes that it chose."""
    chosen, allowed = set(prepared.sizes.used), set(prepared.freedoms.sp_sizes)
    later = {
        "the self-check found another result": chosen - allowed,
        "no room for a group among the ranks": (chosen & allowed) - set(prepared.world.sp_sizes),
        "the profile does not have them": set(prepared.world.sp_sizes) - set(used),
    }
    found = {reason: tuple(sorted(sizes)) for reason, sizes in later.items()}
    return {reason: sizes for reason, sizes in {**prepared.sizes.left_out, **found}.items() if sizes}


def _origin(strategy: DCPStrategy, prepared: Prepared) -> str:
    asked, source = strategy.settings.profile, prepared.settings.profile
    if isinstance(source, Profile):
        return "given" if source is asked else "of the checkpoint"
    if source is None:
        return "measured now"
    return f"read from {source}" if prepared.profile_was_read else f"measured now and kept in {source}"


def _num_steps(loader: DCPLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
