"""The strategy's own arguments, checked, and where a rank runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch

from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.execution import LossSettings
from lightning_dcp.memory import memory_bytes
from lightning_dcp.planners import Balanced, Planner
from lightning_dcp.profile import Profile

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
        self._check_words()
        self._check_numbers()
        if self.planner.lockstep:
            raise ValueError(
                f'planner "{self.planner.name}" plans in lockstep, for engines that communicate in every micro-batch; '
                "ZeRO-1, which trains here, needs none of it. Use lockstep=False; plans in lockstep can be simulated"
            )
        if self.planner.name == "packed":
            raise ValueError(
                f'planner "{self.planner.name}" puts several samples into one row, which cannot be trained yet; its '
                "plans can be made and simulated (lightning-dcp simulate --planner packed). Train with a planner that "
                "pads, for example planner='bucket' or planner='balanced'"
            )
        if not isinstance(self.profile, Profile | str | Path | None) or self.profile == "":
            raise ValueError(f"profile is {self.profile!r}; allowed are a Profile, the name of a file, and None")
        memory_bytes(self.memory_limit, torch.device("cpu"), 1)

    def _check_words(self) -> None:
        if self.recompute not in ("auto", "none", "full"):
            raise ValueError(f'recompute is {self.recompute!r}; allowed are "auto", "none" and "full"')
        if self.self_check not in (True, False, "strict"):
            raise ValueError(f'self_check is {self.self_check!r}; allowed are True, False and "strict"')
        if self.loss.weighting not in ("token", "sample"):
            raise ValueError(f'loss_weighting is {self.loss.weighting!r}; allowed are "token" and "sample"')
        if self.loss.reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction is {self.loss.reduction!r}; allowed are "mean" and "sum"')

    def _check_numbers(self) -> None:
        for name in ("max_batch_size", "max_tokens", "min_micro_batches", "length_groups"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed are integers from 1")
        factor = self.max_step_factor
        if factor is not None and not (isinstance(factor, int | float) and 1 <= factor < math.inf):
            raise ValueError(f"max_step_factor is {self.max_step_factor!r}; allowed are finite numbers from 1")
        sizes = self.sp_sizes
        if sizes is not None and (not sizes or any(type(size) is not int or size < 1 for size in sizes)):
            raise ValueError(f"sp_sizes is {list(sizes)}; allowed are integers from 1, or None for all that fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank runs: the facts about the launch that do not depend on the model."""

    rank: int
    world_size: int
    ranks_per_node: int
    device: torch.device
    precision: str
    timeout: timedelta | None = None
