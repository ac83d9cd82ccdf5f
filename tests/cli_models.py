"""What the command line is given in its tests: the text example in small, with steps for every command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from paragraphs import Paragraphs, TextModel, Texts  # examples/text, the working directory
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


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
    """Its training step fails at once, or where ``late`` is set after the checks of setup()."""

    def __init__(self, late: bool = True) -> None:
        super().__init__()
        self.late = late

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if not self.late or (self.trainer.training and self.trainer.global_step):
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)


def padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collate function as people write it."""
    ids = [row["input_ids"] for row in rows]
    ids_BS = pad_sequence(ids, batch_first=True)
    labels_BS = pad_sequence([x.roll(-1).index_fill(0, torch.tensor(len(x) - 1), -100) for x in ids], True, -100)
    positions_BS = torch.arange(ids_BS.shape[1]).repeat(len(rows), 1)
    return {"input_ids": ids_BS, "labels": labels_BS, "position_ids": positions_BS}


class Plain(pl.LightningDataModule):
    """An ordinary data module with an ordinary loader."""

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        texts = Texts([b"x" * (3 + 5 * (i % 7)) for i in range(24)])
        return DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
