"""Plain loaders under DCPStrategy on the real engine: the updates of one process on the samples of the loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset, WeightedRandomSampler

from lightning_dcp.plan import IterationPlan
from tests.fitting import Case, Module, Result, Samples, assert_same_updates
from tests.pool import Pool
from tests.takeover_tools import CASE, Masking, NoLengths, Taken, fit_alone, fit_taken, ids_of


class Buckets(Sampler[list[int]]):
    """Batches of like lengths of one to three samples, in another order in each epoch."""

    def __init__(self, lengths: Any) -> None:
        order = sorted(range(len(lengths)), key=lambda i: int(lengths[i]))
        self.batches = [order[i : i + 1 + i % 3] for i in (0, 1, 3, 6, 7, 9, 12, 13, 15, 18, 19)]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from (self.batches[i] for i in torch.randperm(len(self.batches), generator=generator))


class Framed(Taken):
    """Gets each batch in the dict that its loader stood in."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert list(batch) == ["text"]
        return super().training_step(batch["text"], batch_idx)


class Tuples(Taken):
    """Gets tuples, and says itself what the loss counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids_BS, labels_BS, kind_B = batch
        values_BS, mask_BS = self.values({"input_ids": ids_BS, "labels": labels_BS, "kind": kind_B})
        return {"loss": (values_BS * mask_BS).sum(), "count": mask_BS.sum()}


def as_tuple(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    batch = Masking()(rows)
    return batch["input_ids"], batch["labels"], batch["kind"]


class Keys(Taken):
    """Remembers what its batches held."""

    seen: ClassVar[set[tuple[str, ...]]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).seen.add(tuple(sorted(batch)))
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Scene:
    """One kind of loader."""

    loader: Any
    module: type[Module] = Taken
    samples: int = 8


def _mixture(samples: Samples, size: int) -> DataLoader[Any]:
    halves: ConcatDataset[Any] = ConcatDataset([Subset(samples, range(5)), Subset(samples, range(5, 20))])
    weights = torch.cat([torch.full((5,), 6.0), torch.full((15,), 1.0)])
    return DataLoader(halves, batch_size=size, sampler=WeightedRandomSampler(weights.tolist(), 24))


SCENES = {
    "shuffled": Scene(lambda s, b: DataLoader(s, batch_size=b, shuffle=True, collate_fn=Masking(4)), Keys),
    "default": Scene(lambda s, b: {"text": DataLoader(NoLengths(s), batch_size=b, num_workers=1)}, Framed),
    "mixture": Scene(_mixture),
    "batches": Scene(
        lambda s, b: DataLoader(s, batch_sampler=Buckets(s.lengths), collate_fn=Masking()), samples=0
    ),
    "tuples": Scene(lambda s, b: DataLoader(s, batch_size=b, collate_fn=as_tuple), Tuples),
}


def _fit(names: list[str], case: Case) -> dict[str, tuple[Result, Any]]:
    found = {}
    for name in names:
        scene = SCENES[name]
        loader = scene.loader(Samples(case), case.batch // case.world_size)
        Keys.seen = set()
        result = fit_taken(case, loader, scene.module)
        found[name] = result, Keys.seen
    return found


def _check(case: Case, answers: list[dict[str, tuple[Result, Any]]]) -> None:
    for name, (result, _) in answers[0].items():
        steps = ids_of(result.plans)
        assert_same_updates(result, fit_alone(case, Samples(case), steps))
        assert all(
            torch.equal(result.weights[n], other[name][0].weights[n]) for other in answers for n in result.weights
        )
        if SCENES[name].samples:
            assert [len(step) for step in steps[:2]] == [8, 8], name


@pytest.mark.feature("Data", "a plain `DataLoader`")
@pytest.mark.feature("Data", "`WeightedRandomSampler` over a `ConcatDataset`")
@pytest.mark.feature("Data", "`batch_sampler=`", "as many batches a step as there are ranks")
@pytest.mark.feature("Data", "batches that are tuples", "with `p = 1`")
def test_every_kind_of_loader_trains_as_one_process_does(pool: Pool) -> None:
    """huggingface/trl#4579 (user keys survive); Lightning-AI/pytorch-lightning#20272 (own batch samplers)."""
    answers = pool.run(_fit, 2, list(SCENES), CASE, timeout=300.0)
    _check(CASE, answers)
    keys = answers[0]["shuffled"][1]
    own = ("attention_mask", "input_ids", "kind", "labels")
    # At p = 1 nothing is added; with more ranks the places in the whole sequence are.
    assert keys == {own, tuple(sorted((*own, "position_ids")))}
    seen = [i % 20 for step in ids_of(answers[0]["mixture"][0].plans)[:3] for i in step]
    assert len(seen) == 24
    assert len(set(seen)) < 24
    wide = {
        name: any(m.sp_size == 2 for text in found.plans for m in IterationPlan.from_json(text).micro_batches)
        for name, (found, _) in answers[0].items()
    }
    assert wide == {name: name != "tuples" for name in SCENES}
    batches = Buckets(Samples(CASE).lengths)
    order = list(batches)
    expected = [sorted(order[k] + (order[k + 1] if k + 1 < len(order) else [])) for k in range(0, 11, 2)]
    assert ids_of(answers[0]["batches"][0].plans) == expected[:5]


def test_four_ranks_take_the_same_steps_with_half_the_batch(pool: Pool) -> None:
    """With the self-check, which must find nothing to switch off: positions come with the shards."""
    case = replace(CASE, world_size=4, steps=2, self_check=True)
    answers = pool.run(_fit, 4, ["shuffled"], case, timeout=300.0)
    _check(case, answers)
    plans = [IterationPlan.from_json(text) for text in answers[0]["shuffled"][0].plans]
    assert {m.sp_size for plan in plans for m in plan.micro_batches} >= {1, 2, 4}
