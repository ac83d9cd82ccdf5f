"""One process of :mod:`benchmarks.overhead`: fits under two strategies in turns, on the same batches."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dcp import DCPDataModule, DCPStrategy, Profile
from lightning_dcp.engine import build_config
from lightning_dcp.models import build
from lightning_dcp.planners import Static
from lightning_dcp.portable import PortableDeepSpeedStrategy

RANKS = 2
WARM_UP = 2
"""Steps of each fit that are not timed: the optimizer's state is made in the first."""
LENGTH = 256
"""Tokens of each sample."""
VOCABULARY = 256

Sample = dict[str, Tensor]


class Model(L.LightningModule):
    """The example's transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build("bytes-1d")

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Mean loss of the batch, which plain Lightning has to be told to log."""
        logits_BSV: Tensor = self.model(batch["input_ids"], batch["position_ids"])
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the example."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(DCPDataModule):
    """Samples of one length, in order."""

    def __init__(self, samples: list[Sample], batch_size: int) -> None:
        super().__init__(global_batch_size=RANKS * batch_size, shuffle=False, lengths=[LENGTH] * len(samples))
        self.train_dataset = samples


class Clock(L.Callback):
    """When each step ended, and the loss of this rank's batches at the end."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.loss = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:  # noqa: ARG002
        """Note them."""
        self.ends.append(time.perf_counter())
        self.loss = float(trainer.callback_metrics["train_loss"])


class Pair:
    """The two strategies over the same samples.

    Args:
        steps: steps of each fit that are timed.
        batch_size: samples of a rank in each step.
        folder: where the loggers write.
    """

    def __init__(self, steps: int, batch_size: int, folder: str) -> None:
        self.steps, self.batch_size, self.folder = steps, batch_size, folder
        self.profile: Profile | None = None
        generator = torch.Generator().manual_seed(0)
        size = ((WARM_UP + steps) * RANKS * batch_size, LENGTH)
        tokens_NS = torch.randint(VOCABULARY, size, generator=generator)
        self.samples: list[Sample] = [{"input_ids": row, "labels": row.roll(-1)} for row in tokens_NS]

    def planned(self) -> Clock:
        """A fit under DCPStrategy, held at p = 1, g = 1, r = 0; the first one measures the profile for all."""
        strategy = DCPStrategy(
            planner=Static(sp_size=1, batch_size=self.batch_size, deal="in_order"),
            sp_sizes=[1],
            recompute="none",
            self_check=False,
            profile=self.profile,
        )
        clock = self._fit(strategy, datamodule=Data(self.samples, self.batch_size))
        self.profile = strategy.profile
        return clock

    def plain(self) -> Clock:
        """A fit under Lightning's own strategy, with an engine of the same settings."""
        config = build_config(None, num_parameters=sum(p.numel() for p in Model().parameters()), half=False)
        rank = torch.distributed.get_rank()
        mine = [row for i, row in enumerate(self.samples) if i // self.batch_size % RANKS == rank]
        loader: DataLoader[Sample] = DataLoader(mine, batch_size=self.batch_size, collate_fn=stacked)  # type: ignore[arg-type]
        strategy = PortableDeepSpeedStrategy(config=config, process_group_backend="gloo")
        return self._fit(strategy, train_dataloaders=loader)

    def seconds(self, clock: Clock) -> float:
        """Mean time of a timed step."""
        return (clock.ends[-1] - clock.ends[WARM_UP - 1]) / self.steps

    def _fit(self, strategy: Any, **data: Any) -> Clock:
        clock = Clock()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=RANKS,
            max_steps=WARM_UP + self.steps,
            gradient_clip_val=1.0,
            logger=CSVLogger(self.folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[clock],
            strategy=strategy,
        )
        trainer.fit(Model(), **data)
        return clock


def stacked(rows: list[Sample]) -> Sample:
    """What the data module makes of the same rows."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch["position_ids"] = torch.arange(LENGTH).repeat(len(rows), 1)
    batch["attention_mask"] = torch.ones(len(rows), LENGTH, dtype=torch.bool)
    return batch


def measure(pairs: int, steps: int, batch_size: int, folder: str) -> list[dict[str, float]]:
    """Seconds per step and the last loss of each fit, pair by pair.

    Args:
        pairs: fits under each strategy.
        steps: steps of each that are timed.
        batch_size: samples of a rank in each step.
        folder: where the loggers write.
    """
    torch.set_num_threads(1)
    both = Pair(steps, batch_size, folder)
    both.planned()  # measures the profile and warms the caches; it does not count
    found = []
    for _ in range(pairs):
        dcp, plain = both.planned(), both.plain()
        found.append(
            {
                "dcp": both.seconds(dcp),
                "plain": both.seconds(plain),
                "dcp_loss": dcp.loss,
                "plain_loss": plain.loss,
            }
        )
    return found
