"""Batches of validation, test and prediction: the collate of training, at sequence-parallel size 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import Dataset

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.lengths import measure, shape_of
from lightning_dcp.data.reading import Collate
from lightning_dcp.plan import MicroBatch, Shape


class IndexedDataset(Dataset[tuple[int, Any]]):
    """Gives each sample together with its index, by which collate finds its shape."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCollate:
    """Collates indexed samples as a micro-batch of one rank.

    Attributes:
        collate: the collate of training.
        shapes: declared shapes ``[n, axes]``; ``None`` measures each sample.
        axes: axes of a sample when it is measured.
    """

    collate: Collate
    shapes: IntArray | None
    axes: int

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Batch:
        """Pad the samples to the longest of them.

        Raises:
            ValueError: a sample has nothing that could be measured.
        """
        shapes = tuple(self._shape(index, sample) for index, sample in items)
        micro_batch = MicroBatch(
            sample_ids=tuple(index for index, _ in items),
            shapes=shapes,
            padded_shape=tuple(max(axis) for axis in zip(*shapes, strict=True)),
            first_rank=0,
            sp_size=1,
            nanoseconds=0,
            bytes=0,
        )
        return self.collate([sample for _, sample in items], micro_batch)

    def _shape(self, index: int, sample: Any) -> Shape:
        if self.shapes is not None:
            return shape_of(self.shapes[index])
        shape = measure(sample, self.axes)
        if shape is None:
            raise ValueError(
                f"sample {index} holds nothing with {self.axes} axes that could be measured; give the dataset an "
                "attribute lengths, or override sample_shapes"
            )
        return shape


def evaluation_loaders(loaders: Any, trainer: pl.Trainer) -> Any:
    """What the Trainer evaluates over in the place of the user's loaders.

    Args:
        loaders: what the user gave or the hook returned: a loader, or a collection of them.
        trainer: that asks for it.
    """
    del trainer
    return loaders
