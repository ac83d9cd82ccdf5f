"""Items from a dataset of a ``DCPDataModule``: its own collate, lengths and groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.evaluation.collating import EvaluationCollate
from lightning_dcp.data.evaluation.feeding import batches, options_of, without_copies
from lightning_dcp.data.evaluation.item import EvaluationItem
from lightning_dcp.data.evaluation.place import Place
from lightning_dcp.data.evaluation.rounds import Assignment, even, mixed, of_rank
from lightning_dcp.data.lengths import read_shapes
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.data.reading import Feed
from lightning_dcp.plan import MicroBatch
from lightning_dcp.seeding import seed_from


class Read(NamedTuple):
    """What a worker hands back for an assignment: the batch, and whose it is."""

    data: Batch
    micro_batch: MicroBatch


class ReadingDataset(Dataset[Read]):
    """A dataset whose indices are assignments.

    Args:
        dataset: of the samples.
        collate: shapes and collate.
    """

    def __init__(self, dataset: Any, collate: EvaluationCollate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, assignment: Assignment) -> Read:
        """Read and collate; the numbers drawn depend on seed and sample alone, as in epoch 0 of a training."""
        seed = self.collate.hooks.seed
        with isolated():
            samples = []
            for index in assignment.ids:
                seed_global(seed_from(seed, 0, index))
                samples.append(self.dataset[index])
            micro_batch = self.collate.micro_batch(
                assignment.ids, samples, assignment.first_rank, assignment.sp_size
            )
            seed_global(seed_from(seed, 0, 0, assignment.ids[0]))
            return Read(self.collate.hooks.collate(samples, micro_batch), micro_batch)


class SampleSource:
    """Evaluates a dataset in its order.

    Args:
        loader: what the data module returned: the dataset, its collate and its workers.
        place: see :class:`Place`.
    """

    sampler = None

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        collate: EvaluationCollate = loader.collate_fn  # type: ignore[assignment]
        self.dataset = loader.dataset.dataset  # type: ignore[attr-defined]
        self.hooks = collate.hooks
        self._collate = collate
        self._place = place
        self._batch_size = int(loader.batch_size or 1)
        self._feed = Feed()
        self._loader = DataLoader(
            ReadingDataset(self.dataset, collate),
            batch_size=None,
            sampler=self._feed,
            collate_fn=_unchanged,
            **options_of(loader),
        )

    def __len__(self) -> int:
        return len(self._own)

    def items(self) -> Iterator[EvaluationItem]:
        """One pass over the items of this rank."""
        own = self._own
        reads = batches(self._loader, self._feed, own, self.hooks.seed)
        for assignment, read in zip(own, reads, strict=True):
            padded = read.micro_batch
            yield EvaluationItem(
                read.data, assignment, shapes=padded.shapes, padded_shape=padded.padded_shape, hooks=self.hooks
            )

    @property
    def sp_sizes(self) -> set[int]:
        """Sizes of the groups that some rank's items run on."""
        return {1} if self._rounds is None else {a.sp_size for placed in self._rounds for a in placed}

    @cached_property
    def _rounds(self) -> list[list[Assignment]] | None:
        place, shapes = self._place, self._shapes()
        if place.rule is None or shapes is None:
            return None
        return mixed(shapes, self._batch_size, place.world, place.rule)

    @cached_property
    def _own(self) -> list[Assignment]:
        place, rule, size = self._place, self._place.rule, self._batch_size
        if self._rounds is not None:
            return of_rank(self._rounds, place.rank)
        if rule is not None and rule.exact_shapes and self._collate.shapes is None:
            size = 1
        own = even(range(len(self.dataset)), size, place.world_size, place.rank)
        return without_copies(own) if place.predicting else own

    def _shapes(self) -> IntArray | None:
        """Shapes of the samples; read where they are not at hand but decide about the groups."""
        rule, shapes = self._place.rule, self._collate.shapes
        if shapes is not None or rule is None or len(self._place.world.sp_sizes) == 1:
            return shapes
        return (
            None
            if rule.fits(1, np.asarray(1), np.asarray(rule.cost.profile.max_tokens))
            else read_shapes(self.dataset)
        )


def _unchanged(read: Any) -> Any:
    return read
