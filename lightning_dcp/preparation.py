"""What happens once in ``setup()``: from the user's model and data to a bound planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.agreement import raise_together
from lightning_dcp.cost import CostModel, IntArray, RecomputePolicy
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.lengths import shape_of
from lightning_dcp.data.loader import DCPLoader, PlanningContext
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.execution import LossSettings, MicroBatchRunner
from lightning_dcp.memory import least_of_all, memory_bytes
from lightning_dcp.plan import MicroBatch
from lightning_dcp.planners import Balanced, Planner
from lightning_dcp.planners.protocol import Limits
from lightning_dcp.profile import Profile
from lightning_dcp.profiling import obtain_profile
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.selfcheck import Freedoms, self_check
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.sequence_parallel.interception import AttentionRecorder
from lightning_dcp.topology import World

SelfCheck = bool | Literal["strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The strategy's own arguments, checked; see :class:`~lightning_dcp.strategy.DCPStrategy`."""

    planner: Planner = field(default_factory=Balanced)
    sp_sizes: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    max_tokens: int | None = None
    min_micro_batches: int = 1
    max_step_factor: float | None = None
    length_groups: int = 6
    recompute: RecomputePolicy = "auto"
    layers: tuple[str | type, ...] | None = None
    memory_limit: float | str = 0.9
    profile: Profile | str | Path | None = None
    self_check: SelfCheck = True
    loss: LossSettings = field(default_factory=LossSettings)

    def __post_init__(self) -> None:
        if self.recompute not in ("auto", "none", "full"):
            raise ValueError(f'recompute is {self.recompute!r}; allowed are "auto", "none" and "full"')
        if self.self_check not in (True, False, "strict"):
            raise ValueError(f'self_check is {self.self_check!r}; allowed are True, False and "strict"')
        if self.loss.weighting not in ("token", "sample"):
            raise ValueError(f'loss_weighting is {self.loss.weighting!r}; allowed are "token" and "sample"')
        if self.loss.reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction is {self.loss.reduction!r}; allowed are "mean" and "sum"')
        for name in ("max_batch_size", "max_tokens", "min_micro_batches", "length_groups"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed are integers from 1")
        factor = self.max_step_factor
        if factor is not None and not (isinstance(factor, int | float) and factor >= 1):
            raise ValueError(f"max_step_factor is {self.max_step_factor!r}; allowed are numbers from 1")
        sizes = self.sp_sizes
        if sizes is not None and (not sizes or any(type(size) is not int or size < 1 for size in sizes)):
            raise ValueError(f"sp_sizes is {list(sizes)}; allowed are integers from 1, or None for all that fit")
        if not isinstance(self.profile, Profile | str | Path | None) or self.profile == "":
            raise ValueError(f"profile is {self.profile!r}; allowed are a Profile, the name of a file, and None")
        memory_bytes(self.memory_limit, torch.device("cpu"), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank runs: the facts about the launch that do not depend on the model."""

    rank: int
    world_size: int
    ranks_per_node: int
    device: torch.device
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that a run of steps needs, made once per fit."""

    world: World
    groups: ProcessGroups
    runner: MicroBatchRunner
    freedoms: Freedoms
    profile: Profile
    limits: Limits
    planner: Planner

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
) -> Prepared:
    """Find layers and heads, build the groups, check the model and measure it; called by every rank.

    The user's module is left bit-equal: weights, buffers, gradients, random numbers, flags and hooks.

    Args:
        settings: the strategy's arguments.
        site: this rank.
        module: the engine's module, after ``deepspeed.initialize``.
        loader: the train loader.
        transfer: moves a collated micro-batch to the device, with the user's hooks.
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
            loss=_loss_settings(settings.loss, loader),
        )

    single = runner_over(ProcessGroups([(rank, 1) for rank in range(site.world_size)]))
    sizes = _sp_sizes(settings, site, single, module, loader, load)
    world = World.build(site.world_size, sizes, site.ranks_per_node)
    groups = ProcessGroups(world.blocks)
    runner = runner_over(groups)
    freedoms = _freedoms(settings, site, runner, world, switch, loader, load)
    world = world.restricted(freedoms.sp_sizes)
    limits = _limits(settings, site, freedoms)
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
    )


def _loss_settings(loss: LossSettings, loader: DCPLoader) -> LossSettings:
    """With the labels named as the data module names them, by which samples are weighted."""
    if not isinstance(loader.hooks, DCPDataModule):
        return loss
    rules = loader.hooks.rules
    return replace(loss, labels_key=rules.labels_key, ignore_index=rules.ignore_index)


def _limits(settings: Settings, site: Site, freedoms: Freedoms) -> Limits:
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


def short_samples(shapes: IntArray, count: int = 16) -> tuple[int, ...]:
    """Short samples of different shapes for the self-check, the shortest first.

    From the shortest quarter of the shapes that occur, evenly spaced; the self-check takes the first two that have
    an item of the loss. Each shape is stood for by its smallest position, so every rank chooses the same.

    Args:
        shapes: size of each sample, int64 ``[n, axes]``.
        count: most samples to give.
    """
    _, first = np.unique(shapes, axis=0, return_index=True)
    order = first[np.lexsort((first, shapes[first].prod(axis=1)))]
    quarter = order[: max(count, len(order) // 4)]
    picks = np.unique(np.linspace(0, len(quarter) - 1, min(count, len(quarter))).astype(np.int64))
    return tuple(int(i) for i in quarter[picks])


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


def _sp_sizes(
    settings: Settings,
    site: Site,
    runner: MicroBatchRunner,
    module: torch.nn.Module,
    loader: DCPLoader,
    load: Callable[[MicroBatch], Batch],
) -> tuple[int, ...]:
    """Sizes that the user allows, the heads can be divided by and the world holds."""
    wanted = set(settings.sp_sizes or range(1, site.world_size + 1))
    if site.world_size == 1 or wanted == {1}:
        return (1,)
    if loader.shapes.shape[1] > 1:
        rank_zero_info(
            "Sequence parallelism is not available for samples of more than one axis: all groups have one rank."
        )
        return (1,)
    seen, error = AttentionRecorder(), None
    try:
        _watch_attention(seen, site.rank, runner, module, loader.shapes, load)
    except Exception as raised:  # user code, which may fail on one rank only
        error = raised
    raise_together(error, site.world_size, "a first forward of training_step")
    if not seen.heads:
        rank_zero_warn(
            "No call of torch.nn.functional.scaled_dot_product_attention was seen in training_step, so sequences "
            "cannot be divided and every group has one rank. Call it through the module "
            '(F.scaled_dot_product_attention), or use attn_implementation="sdpa" in Hugging Face models'
        )
        return (1,)
    legal = set(seen.sp_sizes(site.world_size))
    chosen = tuple(sorted({1} | (legal & wanted)))
    refused = sorted(wanted - legal) if settings.sp_sizes else []
    if seen.cross_attention:
        rank_zero_warn(
            "Attention between sequences of different lengths was seen in training_step; only self-attention can be "
            "divided, so every group has one rank. Set sp_sizes=[1] if that is meant"
        )
    elif refused or chosen == (1,):
        rank_zero_warn(
            f"Sequence-parallel sizes {refused or sorted(wanted - {1})} do not divide the attention heads "
            f"{sorted(seen.heads)} (heads, key/value heads) on {site.world_size} ranks; used are {list(chosen)}"
        )
    return chosen


def _watch_attention(
    recorder: AttentionRecorder,
    rank: int,
    runner: MicroBatchRunner,
    module: torch.nn.Module,
    shapes: IntArray,
    load: Callable[[MicroBatch], Batch],
) -> None:
    """Record what ``training_step`` asks of attention for two samples: one may be as long as a fixed memory is."""
    for sample in short_samples(shapes, 2):
        shape = shape_of(shapes[sample])
        micro_batch = MicroBatch(
            sample_ids=(sample,), shapes=(shape,), padded_shape=shape, first_rank=rank, sp_size=1, nanoseconds=0,
            bytes=0,
        )  # fmt: skip
        with untouched(module), recorder, torch.no_grad(), runner.step(micro_batch, load(micro_batch)):
            pass
