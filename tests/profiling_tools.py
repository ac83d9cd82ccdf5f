"""A small model with its data side and a strategy's surroundings, as a profile meets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.models.presets import build
from lightning_dcp.plan import MicroBatch
from lightning_dcp.planners.protocol import Limits
from lightning_dcp.profiling import LengthProbes, Subject, Survey, plan_probes
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import World

CPU = torch.device("cpu")
LIMITS = Limits(memory_bytes=10**12)
SHAPES: IntArray = np.asarray([[6], [7], [12], [24], [40], [48], [48]], dtype=np.int64)


class Model(L.LightningModule):
    """Next-token training of a small transformer."""

    def __init__(self, name: str = "tiny-1d", **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = build(name, **changes)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch["ids"], batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss


class Hooks:
    """The sharding of the data module for this model."""

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        return {key: value.chunk(group.size, dim=1)[group.rank] for key, value in batch.items()}

    def loss_items(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum())


def load(micro_batch: MicroBatch) -> Batch:
    """Tokens that depend on nothing but the size."""
    batch, tokens = micro_batch.batch_size, micro_batch.padded_shape[0]
    ids = torch.arange(batch * tokens).view(batch, tokens) % 64
    return {"ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(tokens).expand(batch, tokens)}


def runner_of(module: torch.nn.Module, world: World) -> MicroBatchRunner:
    groups = ProcessGroups(world.blocks)
    groups.ensure()
    return MicroBatchRunner(
        module=module,
        groups=groups,
        recompute=RecomputeSwitch(find_families(module)),
        hooks=Hooks(),
        seed=5,
    )


def survey_of(module: torch.nn.Module, world: World | None = None, rank: int = 0, **changes: Any) -> Survey:
    world = world or World.build(1, [1])
    runner = runner_of(module, world)
    survey = Survey(
        subject=Subject(module=module, switch=runner.recompute, run=runner.step, device=CPU),
        world=world,
        rank=rank,
        load=load,
        memory_bytes=10**12,
        leave=runner.groups.leave,
    )
    return replace(survey, **changes)


def lengths_of(sp_sizes: tuple[int, ...] = (1,), num_lengths: int = 3) -> tuple[LengthProbes, ...]:
    return plan_probes(SHAPES, sp_sizes, LIMITS, num_lengths)
