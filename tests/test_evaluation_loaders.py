"""A user's own loaders are evaluated as in one process: order, batch size, samplers, streams."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from lightning_dcp.data.evaluation import EvaluationLoader, Place, evaluation_loaders
from lightning_dcp.topology import World
from tests.evaluating import CASE, Scored, collate_numbered, dcp_trainer, numbered
from tests.fitting import make_trainer
from tests.pool import Pool

DATA = numbered(CASE, 11)


class Stream(IterableDataset[dict[str, Any]]):
    """Samples one after the other; ``part`` leaves some out on a rank."""

    def __init__(self, part: bool = False) -> None:
        self.part = part

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch.distributed as dist

        step = 2 if self.part else 1
        return (DATA[i] for i in range(dist.get_rank() if self.part else 0, 7, step))


class Backwards(BatchSampler):
    """Batches of one and two samples in turn, from the end."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(DATA), 2, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[10], [9, 8], [7], [6, 5], [4]])

    def __len__(self) -> int:
        return 5


def loaders() -> dict[str, Any]:
    plain: dict[str, Any] = {"collate_fn": collate_numbered}
    whole: Any = [collate_numbered([DATA[i], DATA[i + 1]]) for i in (0, 4, 2)]
    return {
        "plain": DataLoader(DATA, batch_size=2, **plain),
        "shuffled, last dropped": DataLoader(
            DATA,
            batch_size=2,
            shuffle=True,
            drop_last=True,
            num_workers=1,
            multiprocessing_context="fork",
            **plain,
        ),
        "batches": DataLoader(DATA, batch_sampler=Backwards(), **plain),
        "whole batches": DataLoader(whole, batch_size=None),
        "stream": DataLoader(Stream(), batch_size=2, **plain),
        "a part": DataLoader(Subset(DATA, [1, 5, 7]), batch_size=2, **plain),
    }


def _validated(world_size: int) -> Any:
    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = dcp_trainer(CASE, world_size)
        module = Scored()
        before = torch.random.get_rng_state()
        results = trainer.validate(module, CombinedLoader(loaders(), "sequential"), verbose=False)
        assert torch.equal(before, torch.random.get_rng_state()), "the random numbers of the run were used"
        evaluated = trainer.validate_loop._combined_loader
    assert evaluated is not None
    kept = [type(loader).__name__ for loader in evaluated.flattened]
    texts = [str(w.message) for w in caught]
    return results, module.calls, kept, texts


@pytest.mark.feature(
    "Data", "your own `DataLoader`, `BatchSampler`, `IterableDataset` in evaluation", "each sample once"
)
def test_own_loaders_are_dealt_out(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#20272: what is evaluated over survives the default Trainer."""
    kinds = loaders()
    single = Scored()
    expected = make_trainer("auto", CASE, devices=1).validate(
        single,
        [kinds["plain"], kinds["batches"], kinds["whole batches"], kinds["stream"], kinds["a part"]],
        verbose=False,
    )
    for world_size in (1, 3):
        results = pool.run(_validated, world_size, world_size, timeout=120.0)
        order = list(kinds)
        for scores, _, kept, texts in results:
            assert set(kept) == {"EvaluationLoader"}
            assert not [text for text in texts if "DistributedSampler" in text or "twice" in text]
            for key in ("per_token", "samples"):
                assert scores[0][f"{key}/dataloader_idx_0"] == pytest.approx(
                    expected[0][f"{key}/dataloader_idx_0"], rel=1e-5
                )
        for number, kind in enumerate(order):
            seen = [
                indices
                for _, calls, *_ in results
                for loader, _, indices, copy, _ in calls
                if loader == number and not copy
            ]
            flat = sorted(i for indices in seen for i in indices)
            if kind == "batches":
                assert sorted(seen) == sorted([(10,), (9, 8), (7,), (6, 5), (4,)])
            elif kind == "whole batches":
                assert sorted(seen) == [(0, 1), (2, 3), (4, 5)]
            elif kind == "stream":
                assert sorted(seen) == [(0, 1), (2, 3), (4, 5), (6,)]
            elif kind == "a part":
                assert flat == [1, 5, 7]
            elif kind == "plain":
                assert flat == list(range(11))
            else:
                assert len(set(flat)) == len(flat) == 10
                assert flat != list(range(10)) or seen != sorted(seen), "the order is not shuffled"
        counts = {len(calls) for _, calls, *_ in results}
        assert len(counts) == 1


class _ByRank(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        import torch.distributed as dist

        return iter(range(dist.get_rank(), 10, 2))


def _refused(kind: str) -> str:
    plain: dict[str, Any] = {"collate_fn": collate_numbered, "batch_size": 2}
    given: dict[str, Any] = {
        "sampler": DataLoader(DATA, sampler=_ByRank(DATA), **plain),
        "stream": DataLoader(Stream(part=True), **plain),
        "combined": CombinedLoader([DataLoader(DATA, **plain)] * 2, "min_size"),
    }
    with pytest.raises(Exception, match="allowed") as caught:
        dcp_trainer(CASE, 2).validate(Scored(), given[kind], verbose=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sampler", ("_ByRank gives other samples on other ranks", "on every rank")),
        ("stream", ("gives other batches on other ranks", "use a dataset with __len__")),
        ("combined", ("mode='min_size'", "Give a list of loaders, or use one device")),
    ],
)
def test_loaders_that_cannot_be_dealt_out_are_refused_on_all_ranks(
    pool: Pool, kind: str, words: tuple[str, ...]
) -> None:
    for text in pool.run(_refused, 2, kind):
        assert all(word in text for word in words), text


def test_a_distributed_sampler_is_taken_apart() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=2, rank=1)
    place = Place(rank=0, world=World.build(1, [1]))
    loader = evaluation_loaders(
        DataLoader(DATA, batch_size=4, sampler=sampler, collate_fn=collate_numbered), place
    )
    assert isinstance(loader, EvaluationLoader)
    assert [item.ids for item in loader] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
    assert evaluation_loaders({"a": [loader]}, place) == {"a": [loader]}
