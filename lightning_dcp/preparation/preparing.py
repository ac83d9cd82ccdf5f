"""From the user's model and data to everything that steps need: groups, self-check, profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_dcp.collectives import WorldCalls
from lightning_dcp.cost import CostModel
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.lengths import shape_of
from lightning_dcp.data.loader import DCPLoader, PlanningContext
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.execution import LossSettings, MicroBatchRunner
from lightning_dcp.memory import least_of_all, memory_bytes
from lightning_dcp.metrics import FlopCount
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.planners.protocol import Limits, Planner
from lightning_dcp.preparation.settings import Settings, Site
from lightning_dcp.preparation.sizes import Sizes, short_samples, sp_sizes
from lightning_dcp.profile import Profile
from lightning_dcp.profiling import count_flops, obtain_profile
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.selfcheck import Freedoms, self_check
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that a run of steps needs, made once per fit, and how it came about.

    Attributes:
        world: ranks and the groups that plans may use.
        groups: process groups.
        runner: opens micro-batches.
        freedoms: what the self-check found.
        profile: what was measured, read or given.
        limits: limits of all plans.
        planner: plans the steps.
        settings: the strategy's arguments, with the profile of a checkpoint where that is used.
        sizes: sequence-parallel sizes before the self-check, and why the others are left out.
        profile_was_read: the profile's file was there, as this rank sees it.
        load: a collated micro-batch on the device.
    """

    world: World
    groups: ProcessGroups
    runner: MicroBatchRunner
    freedoms: Freedoms
    profile: Profile
    limits: Limits
    planner: Planner
    settings: Settings
    sizes: Sizes
    profile_was_read: bool
    load: Callable[[MicroBatch], Batch]
    flops: FlopCount | None = None

    def planning(self, rank: int, profile: Profile) -> PlanningContext:
        """What the loader plans with."""
        cost = CostModel(profile)
        # A profile of an earlier run may lack a size that is legal here; it cannot be planned then.
        world = self.world.restricted(set(self.world.sp_sizes) & set(cost.sp_sizes))
        return PlanningContext(rank=rank, planner=self.planner, cost=cost, world=world, limits=self.limits)


def prepare(
    settings: Settings,
    site: Site,
    module: torch.nn.Module,
    loader: DCPLoader,
    transfer: Callable[[Batch], Batch],
    world_calls: WorldCalls,
) -> Prepared:
    """Find layers and heads, lay out the groups, check the model and measure it; called by every rank.

    The user's module is left bit-equal: weights, buffers, gradients, random numbers, flags and hooks.

    Args:
        settings: the strategy's arguments.
        site: this rank.
        module: the engine's module, after ``deepspeed.initialize``.
        loader: the train loader.
        transfer: moves a collated micro-batch to the device, with the user's hooks.
        world_calls: refuses collectives of all ranks inside a micro-batch.
    """

    def load(micro_batch: MicroBatch) -> Batch:
        return transfer(loader.load(micro_batch))

    switch = RecomputeSwitch(find_families(module, settings.layers))

    def runner_over(groups: ProcessGroups) -> MicroBatchRunner:
        return MicroBatchRunner(
            module=module,
            groups=groups,
            recompute=switch,
            hooks=loader.hooks,
            seed=loader.sampler.seed,
            loss=loss_settings(settings.loss, loader.hooks),
            world_calls=world_calls,
        )

    single = runner_over(ProcessGroups([(rank, 1) for rank in range(site.world_size)]))
    sizes = sp_sizes(settings, site, single, loader, load)
    world = World.build(site.world_size, sizes.used, site.ranks_per_node)
    groups = ProcessGroups(world.blocks, timeout=site.timeout, device=site.device)
    runner = runner_over(groups)
    freedoms = _freedoms(settings, site, runner, world, switch, loader, load)
    world = world.restricted(freedoms.sp_sizes)
    limits = limits_of(settings, site, freedoms)
    was_there = isinstance(settings.profile, str | Path) and Path(settings.profile).exists()
    profile = obtain_profile(
        settings.profile,
        runner=runner,
        world=world,
        rank=site.rank,
        device=site.device,
        precision=site.precision,
        shapes=loader.shapes,
        load=load,
        limits=limits,
        length_groups=settings.length_groups,
    )
    return Prepared(
        world=world,
        groups=groups,
        runner=runner,
        freedoms=freedoms,
        profile=profile,
        limits=limits,
        planner=settings.planner,
        settings=settings,
        sizes=sizes,
        profile_was_read=was_there,
        load=load,
        flops=count_flops(single, site.rank, site.world_size, _short(loader, 4), load),
    )


def _short(loader: DCPLoader, count: int) -> list[tuple[int, Shape]]:
    """Positions and shapes of a few short samples."""
    return [(i, shape_of(loader.shapes[i])) for i in short_samples(loader.shapes, count)]


def loss_settings(loss: LossSettings, data: object) -> LossSettings:
    """With the labels named as the data module names them, by which samples are weighted.

    Args:
        loss: the strategy's own arguments.
        data: a ``DCPDataModule``, or anything else, which names nothing.
    """
    if not isinstance(data, DCPDataModule):
        return loss
    return replace(loss, labels_key=data.rules.labels_key, ignore_index=data.rules.ignore_index)


def limits_of(settings: Settings, site: Site, freedoms: Freedoms) -> Limits:
    """Limits of all plans; one all-reduce, called by every rank."""
    return Limits(
        memory_bytes=least_of_all(
            memory_bytes(settings.memory_limit, site.device, site.ranks_per_node), site.device
        ),
        max_batch_size=settings.max_batch_size,
        max_tokens=settings.max_tokens,
        min_micro_batches=settings.min_micro_batches,
        max_step_factor=settings.max_step_factor,
        recompute=settings.recompute if freedoms.recompute else "none",
        exact_shapes=freedoms.exact_shapes,
    )


def _freedoms(
    settings: Settings,
    site: Site,
    runner: MicroBatchRunner,
    world: World,
    switch: RecomputeSwitch,
    loader: DCPLoader,
    load: Callable[[MicroBatch], Batch],
) -> Freedoms:
    if not settings.self_check:
        return Freedoms(exact_shapes=False, sp_sizes=world.sp_sizes, recompute=True, messages=())
    ids = short_samples(loader.shapes)
    return self_check(
        runner=runner,
        load=load,
        sample_ids=ids,
        shapes=tuple(shape_of(loader.shapes[i]) for i in ids),
        world=world,
        num_layers=switch.num_layers,
        rank=site.rank,
        device=site.device,
        strict=settings.self_check == "strict",
    )
