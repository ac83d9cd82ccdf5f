"""A small language model over the paragraphs of Python's reference, which every interpreter carries."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_dcp import DCPDataModule
from lightning_dcp.models import build


class Texts(Dataset[dict[str, Tensor]]):
    """Texts as bytes; their lengths are looked up as ``lengths``."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.lengths = [len(text) for text in texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample ``[S]``; the labels are made from it later."""
        return {"input_ids": torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()}


class Paragraphs(DCPDataModule):
    """One paragraph is one sample; every 25th is kept for validation.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks; ``None`` for a planner that draws them.
        max_bytes: where a longer paragraph is cut.
        num_workers: processes that read ahead, per rank.
    """

    def __init__(self, global_batch_size: int | None = 32, max_bytes: int = 1024, num_workers: int = 0) -> None:
        super().__init__(global_batch_size, num_workers=num_workers, shift_labels=True)
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Cut the topics of the reference into paragraphs."""
        paragraphs = [part.encode() for text in topics.values() for part in text.split("\n\n")]
        texts = [part[: self.max_bytes] for part in paragraphs if len(part) > 1]
        self.val_dataset = Texts(texts[::25])
        self.train_dataset = Texts([text for index, text in enumerate(texts) if index % 25])


class TextModel(L.LightningModule):
    """A causal transformer that predicts the next byte. Its optimizer comes from the configuration.

    Args:
        preset: size of the model, a name that ``lightning_dcp.models.build`` knows.
    """

    def __init__(self, preset: str = "bytes-1d") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build(preset)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Mean loss over the labels of the batch; padding is ignored."""
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log the loss of paragraphs that were not trained on."""
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        logits_BSV = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())
