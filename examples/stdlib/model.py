"""A language model over bytes: an ordinary LightningModule."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

from lightning_dcp.models import build  # dcp


class ByteModel(L.LightningModule):
    """A causal transformer that predicts the next byte.

    Args:
        preset: size of the model, a name that ``build`` knows.
        learning_rate: peak of the schedule.
        warmup_steps: steps in which the learning rate rises to its peak; then it falls as ``1 / sqrt(step)``.
    """

    def __init__(self, preset: str = "bytes-1d", learning_rate: float = 3e-3, warmup_steps: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build(preset)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps

    def forward(self, input_ids_BS: torch.Tensor, position_ids_BS: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, S, 256]`` of the byte that follows each byte."""
        logits_BSV: torch.Tensor = self.model(input_ids_BS, position_ids_BS)
        return logits_BSV

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """Mean loss over the labels of the batch; padding is ignored."""
        logits_BSV = self(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW with a warm-up, stepped after every optimizer step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

        def factor(step: int) -> float:
            return min((step + 1) / self.warmup_steps, math.sqrt(self.warmup_steps / (step + 1)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
