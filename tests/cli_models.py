"""What the command line is given in its tests: the text example in small, with steps for every command."""

from __future__ import annotations

from typing import Any

import torch
from paragraphs import Paragraphs, TextModel  # examples/text, the working directory


class Evaluated(TextModel):
    """With test and prediction."""

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        logits_BSV: torch.Tensor = self.model(batch["input_ids"], batch["position_ids"])
        return logits_BSV[:, -1].argmax(-1)


class Few(Paragraphs):
    """So few samples that each command ends at once."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train_dataset.texts, self.train_dataset.lengths = (
            self.train_dataset.texts[:24],
            self.train_dataset.lengths[:24],
        )
        self.val_dataset.texts, self.val_dataset.lengths = self.val_dataset.texts[:4], self.val_dataset.lengths[:4]
        self.test_dataset = self.predict_dataset = self.val_dataset


class Broken(TextModel):
    """Its training step fails after the checks of setup()."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.trainer.training and self.trainer.global_step:
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)
