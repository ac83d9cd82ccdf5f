"""Items from a user's own ``DataLoader`` over a dataset with indices: its batches, dealt out to single ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.data.evaluation.feeding import batches, options_of, without_copies
from lightning_dcp.data.evaluation.item import EvaluationItem
from lightning_dcp.data.evaluation.padding import collate_of
from lightning_dcp.data.evaluation.place import Place
from lightning_dcp.data.evaluation.rounds import Assignment, dealt, even
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.data.reading import Feed
from lightning_dcp.seeding import seed_from


class BatchSource:
    """Evaluates what a ``DataLoader`` would give in one process.

    Batch size, collate, workers, pinning and the order of the sampler are the user's. The last samples are spread
    over the ranks in smaller batches; batches of a batch sampler of the user's own stay whole.

    Args:
        loader: over a dataset with indices.
        place: see :class:`Place`.
    """

    hooks = None

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        self.dataset = loader.dataset
        self._place = place
        self._kept = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        self._batch_size = None if self._kept else loader.batch_size
        self._drop_last = bool(loader.drop_last)
        self.sampler = self._sampler(loader)
        self._feed = Feed()
        # batch_size=None hands samples over one by one, as they are; a batch sampler of one sample would stack them.
        how: dict[str, Any] = (
            {"batch_size": None, "sampler": self._feed}
            if loader.batch_sampler is None
            else {"batch_sampler": self._feed}
        )
        self._single = loader.batch_sampler is None
        self._loader = DataLoader(loader.dataset, collate_fn=collate_of(loader), **how, **options_of(loader))

    def _sampler(self, loader: DataLoader[Any]) -> Any:
        if self._kept:
            return loader.batch_sampler
        if isinstance(loader.sampler, DistributedSampler):
            # It would give this rank's part, some samples twice; the whole dataset is dealt out here.
            return SequentialSampler(loader.sampler.dataset)  # type: ignore[arg-type]
        if self._place.in_order and type(loader.sampler) is not SequentialSampler:
            rank_zero_warn("overfit_batches leaves the random order of an evaluation loader out, as for training")
            return SequentialSampler(loader.dataset)  # type: ignore[arg-type]
        return loader.sampler

    def __len__(self) -> int:
        return len(self._deal([[0]] * len(self.sampler) if self._kept else range(len(self.sampler))))

    def items(self) -> Iterator[EvaluationItem]:
        """One pass over the items of this rank; one small gather over the world where the order is not the dataset's.

        Raises:
            ValueError: on all ranks, if the ranks' samplers give different samples.
        """
        own = self._deal(self._order())
        coming = [item.ids[0] if self._single else list(item.ids) for item in own]
        for assignment, data in zip(own, batches(self._loader, self._feed, coming, self._place.seed), strict=True):
            yield EvaluationItem(data, assignment)

    def _deal(self, order: Sequence[Any]) -> list[Assignment]:
        place, size = self._place, self._batch_size
        if self._kept:
            own = dealt(order, place.world_size, place.rank)
        else:
            used = order[: len(order) // size * size] if self._drop_last and size else order
            own = even(used, size or 1, place.world_size, place.rank)
        return without_copies(own) if place.predicting else own

    def _order(self) -> Sequence[Any]:
        if type(self.sampler) is SequentialSampler:
            return range(len(self.sampler))
        with isolated():
            seed_global(seed_from(self._place.seed))
            order = list(self.sampler)
        digest = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest()
        if len(set(of_all_ranks(digest, self._place.world_size))) > 1:
            raise ValueError(
                f"the sampler {type(self.sampler).__name__} gives other samples on other ranks; allowed is one that "
                "gives all samples, in one order, on every rank: they are dealt out to the ranks afterwards. Leave "
                "out what divides by rank, and seed what is random"
            )
        return order
