"""From a model, its data and its limits to a profile: the entry point of the strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.memory import least_of_all, memory_bytes
from lightning_dcp.plan import MicroBatch
from lightning_dcp.planners.protocol import Limits
from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.profiling.measure import Survey, measure
from lightning_dcp.profiling.probe import Subject
from lightning_dcp.profiling.probes import plan_probes
from lightning_dcp.profiling.static import static_bytes
from lightning_dcp.profiling.store import Wanted, load_or_measure, profile_identity, same_for_all
from lightning_dcp.topology import World


def obtain_profile(  # noqa: PLR0913 - everything that a run has by then, by name
    source: Profile | str | Path | None,
    *,
    runner: MicroBatchRunner,
    world: World,
    rank: int,
    device: torch.device,
    precision: str,
    shapes: IntArray,
    load: Callable[[MicroBatch], Batch],
    limits: Limits,
    length_groups: int = 6,
) -> Profile:
    """Read or measure the profile of a run; called by every rank, after ``deepspeed.initialize``.

    Collectives over the world: one broadcast of rank 0's identity, one all-reduce of the smallest memory and one for
    each measured length, one broadcast where a file is named.
    Measuring takes a few seconds for a small model on a CPU; ``module`` is left bit-equal.

    Args:
        source: a profile (one with an empty identity is for any model with these numbers of layers); a file that
            is read, or written if it does not exist; ``None`` to measure.
        runner: runs the model's ``training_step``.
        world: ranks and the groups to measure.
        rank: global rank of this process.
        device: device of this process.
        precision: as given to the Trainer.
        shapes: sizes of all samples, ``[n, axes]``.
        load: a collated, unsharded micro-batch on the device.
        limits: memory and batch limits of the plans.
        length_groups: how many lengths are measured.

    Raises:
        ProfileError: on all ranks: the given profile was measured for something else (the differing fields are
            named), or a length fits into memory with no setting.
    """
    module, switch = runner.module, runner.recompute
    identity = same_for_all(
        profile_identity(module, switch, world_size=world.world_size, precision=precision, device=device)
    )
    wanted = Wanted(identity=identity, max_tokens=int(shapes.prod(axis=1).max()))
    if isinstance(source, Profile):
        return _given(source, wanted, switch.num_layers)
    survey = Survey(
        subject=Subject(module=module, switch=switch, run=runner.step, device=device),
        world=world,
        rank=rank,
        load=load,
        # What the device holds, not what plans may use: a small limit must not keep lengths from being measured.
        memory_bytes=least_of_all(memory_bytes(0.9, device, world.ranks_per_node), device),
        static_bytes=static_bytes(module, world.world_size),
        progress=True,
        leave=runner.groups.leave,
    )

    def fresh() -> Profile:
        runner.groups.ensure(world.sp_sizes)
        return measure(survey, plan_probes(shapes, world.sp_sizes, limits, length_groups), identity)

    return fresh() if source is None else load_or_measure(Path(source), wanted, fresh, rank=rank)


def _given(profile: Profile, wanted: Wanted, num_layers: tuple[int, ...]) -> Profile:
    checked = wanted.check(profile, "the given profile")
    if checked.num_layers != num_layers:
        raise ProfileError(
            f"the given profile is for families of {checked.num_layers} layers, the model has {num_layers}; measure "
            "anew, or name the layers that were measured (layers=[...])"
        )
    return checked
