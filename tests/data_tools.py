"""A tiny planner, datasets and models that the tests of the data side share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_dcp.cost import CostModel
from lightning_dcp.data.batch import Batch, DCPBatch
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.data.planning import PlanningContext
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import Limits, PlanRequest
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import World


class RoundRobin:
    """Deals micro-batches of up to ``batch_size`` samples round the groups of ``sp_size`` ranks."""

    name = "round-robin"
    draws = False
    lockstep = False

    def __init__(self, batch_size: int = 2, sp_size: int = 1) -> None:
        self.batch_size = batch_size
        self.sp_size = sp_size

    def plan(self, request: PlanRequest) -> IterationPlan:
        blocks = request.world.blocks_of(self.sp_size)
        micro_batches = []
        for number, start in enumerate(range(0, len(request.sample_ids), self.batch_size)):
            shapes = request.sizes[start : start + self.batch_size]
            longest = [max(axis) for axis in zip(*shapes, strict=True)]
            longest[0] = -(-longest[0] // self.sp_size) * self.sp_size
            micro_batches.append(
                MicroBatch(
                    sample_ids=request.ids[start : start + self.batch_size],
                    shapes=shapes,
                    padded_shape=tuple(longest),
                    first_rank=blocks[number % len(blocks)][0],
                    sp_size=self.sp_size,
                    nanoseconds=sum(longest),
                    bytes=0,
                )
            )
        return IterationPlan(world_size=request.world.world_size, micro_batches=tuple(micro_batches))


def context(rank: int = 0, world_size: int = 1, planner: Any = None) -> PlanningContext:
    measurement = Measurement(
        batch_size=1, shape=(8,), sp_size=1, forward=(10,), backward=(20,), recompute=(10,),
        activation_bytes=(100,), input_bytes=(10,), constant_time=5, constant_bytes=50,
    )  # fmt: skip
    profile = Profile(identity={}, num_layers=(2,), static_bytes=0, measurements=(measurement,))
    return PlanningContext(
        rank=rank,
        planner=planner or RoundRobin(),
        cost=CostModel(profile),
        world=World.build(world_size, [p for p in range(1, world_size + 1) if world_size % p == 0]),
        limits=Limits(memory_bytes=10**9),
    )


class Tokens:
    """Sample ``i`` has the tokens ``100 * i, 100 * i + 1, ...`` and draws from all three global generators."""

    def __init__(self, lengths: Sequence[int], known: bool = True) -> None:
        self.sizes = list(lengths)
        if known:
            self.lengths = np.asarray(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = torch.tensor(
            [float(torch.rand(())), float(np.random.rand()), random.random()], dtype=torch.float64
        )
        return {
            "input_ids": torch.arange(self.sizes[index]) + 100 * index,
            "index": index,
            "draws": draws,
            "name": f"sample {index}",
        }


class TokensModule(DCPDataModule):
    """A data module over one train dataset; its collate draws a number."""

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.train_dataset = dataset

    def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        batch = super().collate(samples, micro_batch)
        batch["collate_draw"] = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return batch


def generator_states() -> tuple[list[int], str, str]:
    """States of the three global generators, to compare."""
    return (
        torch.get_rng_state().tolist(),
        str([list(map(str, part)) if isinstance(part, np.ndarray) else part for part in np.random.get_state()]),
        repr(random.getstate()),
    )


LENGTHS = [5, 3, 9, 1, 7, 2, 8, 4, 6, 11, 10]


def loader_of(module: DCPDataModule, rank: int = 0, world_size: int = 1, planner: Any = None) -> DCPLoader:
    loader = module.train_dataloader()
    loader.bind(context(rank, world_size, planner))
    return loader


def ids_of(batch: DCPBatch) -> list[int]:
    """Samples that this rank trains on in a step."""
    assert batch.error is None, batch.error
    return [int(i) for data in batch.data for i in data["index"]]


class Recorder(L.LightningModule):
    """Trains on nothing and writes down the samples of each step."""

    def __init__(self, total_steps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []
        self.total_steps = total_steps

    def training_step(self, batch: DCPBatch) -> torch.Tensor:
        self.seen.append((batch.epoch, ids_of(batch)))
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.total_steps:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(steps, 1))]

    def epochs(self) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for epoch, ids in self.seen:
            found.setdefault(epoch, []).append(ids)
        return found


class BindingStrategy(SingleDeviceStrategy):
    """What DCPStrategy does for the loader, on one process: bind it, mark what was trained on."""

    def __init__(self, restore_late: bool = False) -> None:
        super().__init__(device="cpu")
        self.restore_late = restore_late

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read after the optimizers are made, as DeepSpeed's strategy does."""
        return self.restore_late

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DCPLoader):
            dataloader.bind(context())
        return super().process_dataloader(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self.running: DCPBatch = args[0]
        return output

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        loader = self.lightning_module.trainer.train_dataloader
        assert isinstance(loader, DCPLoader)
        loader.mark_consumed(self.running)
        return output


def trainer(folder: Any, **arguments: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "strategy": BindingStrategy(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return L.Trainer(**{**defaults, **arguments})
