"""Batches of a ``DCPDataModule``'s evaluation datasets: the collate of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Dataset

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.lengths import measure, shape_of
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.planners.assembly import pad
from lightning_dcp.sequence_parallel.context import SPGroup


class EvaluationHooks(Protocol):
    """What the owner of a dataset knows about its batches; ``DCPDataModule`` satisfies it."""

    seed: int

    def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """One batch of the samples of a micro-batch, before sharding."""
        ...

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        """The part of a batch that one rank of a group computes."""
        ...

    def loss_items(self, batch: Batch) -> int:
        """Items of a shard that a loss averages over."""
        ...


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
    """Collates indexed samples.

    Attributes:
        hooks: the data module.
        shapes: declared shapes ``[n, axes]``; ``None`` measures each sample.
        axes: axes of a sample when it is measured.
    """

    hooks: EvaluationHooks
    shapes: IntArray | None
    axes: int

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Batch:
        """Pad the samples to the longest of them, as a micro-batch of one rank.

        Raises:
            ValueError: a sample has nothing that could be measured.
        """
        samples = [sample for _, sample in items]
        return self.hooks.collate(samples, self.micro_batch([index for index, _ in items], samples))

    def micro_batch(
        self, ids: Sequence[int], samples: Sequence[Any], first_rank: int = 0, sp_size: int = 1
    ) -> MicroBatch:
        """The micro-batch of samples that have been read.

        Args:
            ids: their indices in the dataset.
            samples: as the dataset gave them.
            first_rank: of the group that computes it.
            sp_size: ranks of that group.

        Raises:
            ValueError: a sample has nothing that could be measured.
        """
        shapes = tuple(self._shape(index, sample) for index, sample in zip(ids, samples, strict=True))
        return MicroBatch(
            sample_ids=tuple(ids),
            shapes=shapes,
            padded_shape=pad(shapes, sp_size),
            first_rank=first_rank,
            sp_size=sp_size,
            nanoseconds=0,
            bytes=0,
        )

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
