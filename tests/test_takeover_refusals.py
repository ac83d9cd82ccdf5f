"""Loaders that cannot train: one sentence with got, allowed, do; before a process group exists where they are given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_dcp.data.own_order import given_by, given_order
from lightning_dcp.strategy import DCPStrategy
from tests.data_tools import LENGTHS, TokensModule, generator_states, loader_of
from tests.data_tools import Tokens as Samples
from tests.fitting import Case, Module, make_trainer

CASE = Case(world_size=1)
DATA: Any = Samples(LENGTHS)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from DATA.sizes


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return DATA[index]


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Order(Sampler[int]):
    """Whatever a function gives."""

    def __init__(self, order: Callable[[int], Any]) -> None:
        self.order = order
        self.epoch = 0
        self.calls = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        yield from self.order(self.calls if self.epoch == 0 else self.epoch)


class Part(Sampler[int]):
    """One rank's part, by somebody else's rules."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        yield from range(0, 11, 2)


def loader(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(kwargs.pop("dataset", DATA), **{"batch_size": 2, **kwargs})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (
        lambda: loader(dataset=Stream()),
        r"IterableDataset.*allowed is a dataset with __len__.*ConcatDataset",
    ),
    "unsized": (lambda: loader(dataset=Unsized(), sampler=[0, 1]), r"Unsized has no length.*Give it __len__"),
    "two": (
        lambda: [loader(), loader()],
        r"got 2 train loaders; allowed is one.*ConcatDataset.*WeightedRandomSampler",
    ),
    "combined": (
        lambda: CombinedLoader({"a": loader(), "b": loader()}, "min_size"),
        r"got 2 train loaders; allowed is one",
    ),
    "own": (lambda: loader_class(Own), r"Own makes its batches in an __iter__ of its own.*collate_fn"),
    "list": (lambda: [[torch.zeros(3)]], r"no DCPLoader for training but a Tensor; allowed is a torch DataLoader"),
    "unbatched": (lambda: loader(batch_size=None), r"batch_size=None\) gives what.*allowed is a batch_size"),
    "lists": (
        lambda: loader(batch_size=None, sampler=BatchSampler(SequentialSampler(DATA), 2, False)),
        r"sampler=BatchSampler\(...\), batch_size=None\).*allowed is batch_sampler=",
    ),
    "restless": (
        lambda: loader(sampler=Order(lambda call: np.roll(range(11), call))),
        r"Order gave two orders for the same seed and epoch.*global generators",
    ),
    "foreign": (lambda: loader(sampler=Order(lambda call: [3, 11])), r"gave \[11\].*positions from 0 to 10"),
    "nothing": (lambda: loader(sampler=Order(lambda call: [])), r"gave nothing in epoch 0"),
    "batches": (lambda: loader(sampler=Order(lambda call: [[1], [2]])), r"allowed are integers.*batch_sampler="),
    "part": (lambda: loader(sampler=Part()), r"Part gives each rank its part.*the strategy itself divides"),
}


def loader_class(kind: type[DataLoader[Any]]) -> DataLoader[Any]:
    return kind(DATA, batch_size=2)


@pytest.mark.feature("Data", "`IterableDataset`", "refused: a dataset with `__len__` and `__getitem__`")
@pytest.mark.feature(
    "Data", "several train loaders", "refused: `ConcatDataset` (one loader in a collection works)"
)
@pytest.mark.feature("Data", "`DataLoader(batch_size=None)`", "refused: a `batch_size`, or `batch_sampler=`")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_given_loaders_are_refused_before_a_process_group_exists(name: str) -> None:
    """Lightning-AI/pytorch-lightning#15899: lists of positions under batch_size=None do not become single ones."""
    make, sentence = REFUSED[name]
    with pytest.raises(MisconfigurationException, match="(?s)" + sentence):
        make_trainer(DCPStrategy(), CASE, devices=1).fit(Module(CASE), make())
    assert not dist.is_initialized(), "refused too late: a process group exists"


def test_a_draw_leaves_all_generators_as_they_were() -> None:
    own: list[Any] = [torch.Generator(), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)]

    class Drawing(Sampler[int]):
        def __init__(self) -> None:
            self.torch, self.numpy, self.legacy, self.plain = own

        def __iter__(self) -> Iterator[int]:
            draws = [
                int(torch.randint(11, (1,), generator=self.torch)),
                int(self.numpy.integers(11)),
                int(self.legacy.randint(11)),
                self.plain.randrange(11),
                int(torch.randint(11, (1,))),
                int(np.random.randint(11)),
                random.randrange(11),
            ]
            yield from draws

    before = generator_states(), own[0].get_state().tolist(), str(own[1].bit_generator.state), own[3].getstate()
    sampler = Drawing()
    given = given_order(sampler, 11, seed=5)
    assert given.draw is not None
    orders = [given.draw(epoch).samples.tolist() for epoch in (0, 1, 0, 2)]
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    # Each of the seven numbers comes from another generator, and every one of them is seeded.
    many = np.asarray([given.draw(epoch).samples for epoch in range(40)])
    assert all(len(np.unique(column)) > 5 for column in many.T)
    assert orders[0] != given_order(sampler, 11, seed=6).draw(0).samples.tolist()  # type: ignore[misc]
    after = generator_states(), own[0].get_state().tolist(), str(own[1].bit_generator.state), own[3].getstate()
    assert before == after


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_order_behind_a_distributed_sampler_is_that_of_all_its_ranks(
    shuffle: bool, drop_last: bool, ranks: int
) -> None:
    """Round the ranks, its parts make the order; what it repeats to fill up is not repeated."""
    parts: list[Any] = [
        DistributedSampler(DATA, ranks, r, shuffle=shuffle, seed=7, drop_last=drop_last) for r in range(ranks)
    ]
    given = given_order(parts[-1], 11, seed=0)
    assert given.draw is not None
    for epoch in range(3):
        for part in parts:
            part.set_epoch(epoch)
        rounds = [i for row in zip(*parts, strict=True) for i in row]
        wanted = rounds if drop_last else rounds[:11]
        assert given.draw(epoch).samples.tolist() == wanted


def test_a_sampler_that_is_longer_in_some_epochs_is_refused_or_has_no_length() -> None:
    class Growing(Order):
        def __iter__(self) -> Iterator[int]:
            yield from self.order(self.epoch)

    growing = Growing(lambda epoch: range(1 + min(epoch, 4)))
    steps = loader_of(TokensModule(DATA, global_batch_size=2, sampler=growing)).sampler
    assert [steps.num_steps(epoch) for epoch in range(5)] == [1, 1, 2, 2, 3]
    with pytest.raises(TypeError, match=r"Growing has no __len__.*Trainer\(max_steps"):
        len(steps)

    class Liar(Order):
        def __len__(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"says that it has 2 places and gave 3 in epoch 0.*remove its __len__"):
        given_order(Liar(lambda epoch: range(3)), 11, seed=0)


def test_tuples_of_different_lengths_need_a_collate_fn() -> None:
    class Pairs(Samples):
        def __getitem__(self, index: int) -> Any:
            row = super().__getitem__(index)
            return row["input_ids"], index

    with pytest.raises(
        MisconfigurationException, match=r"of type tuple and differ in length.*collate_fn that pads"
    ):
        make_trainer(DCPStrategy(), CASE, devices=1).fit(Module(CASE), loader(dataset=Pairs(LENGTHS)))


def test_a_dropped_epoch_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"needs 12 samples for a step, and the dataset has 11"):
        make_trainer(DCPStrategy(), CASE, devices=1).fit(Module(CASE), loader(batch_size=12, drop_last=True))


def test_what_counts_in_a_batch_is_unknown() -> None:
    """A tuple without names, and a plain loss: the sentence names the ways out."""

    class Plain(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(p.sum() for p in self.parameters()) * 0.0

    data = TensorDataset(torch.zeros(6, 4), torch.zeros(6))
    strategy = DCPStrategy(self_check=False, memory_limit="1GB")
    with pytest.raises(
        Exception, match=r'(?s)the batch is a list, with neither "labels".*Return \{"loss".*loss_items'
    ):
        make_trainer(strategy, CASE, devices=1, max_steps=1).fit(Plain(CASE), DataLoader(data, batch_size=2))


@pytest.mark.feature("Data", "`DCPDataModule(sampler=...)`", "any sampler, or a function of the dataset")
def test_a_data_module_takes_a_sampler_or_a_function_that_makes_one() -> None:
    weights = [1.0, 5.0] * 5 + [1.0]
    for sampler in (
        WeightedRandomSampler(weights, 15),
        lambda dataset: WeightedRandomSampler(weights[: len(dataset)], 15),
    ):
        bound = loader_of(TokensModule(DATA, global_batch_size=4, sampler=sampler, seed=3))
        assert len(bound) == 4
        names = [[name for data in step.data for name in data["name"]] for step in bound]
        order = given_by(sampler, DATA, 3).draw(0).samples  # type: ignore[union-attr, misc]
        assert [len(step) for step in names] == [4, 4, 4, 3]
        assert sorted(n for step in names for n in step) == sorted(f"sample {i}" for i in order)
    again = loader_of(TokensModule(DATA, global_batch_size=4, sampler=[1, 1, 1, 1]))
    draws = [float(d[0]) for step in again for data in step.data for d in data["draws"]]
    assert len(set(draws)) == 4, "a sample that comes again draws anew"


def test_lengths_of_concatenated_datasets_are_known() -> None:
    both: Any = ConcatDataset([Samples([3, 4]), Samples([5])])  # type: ignore[list-item]
    found = loader_of(TokensModule(both, global_batch_size=2, sampler=RandomSampler(both))).shapes
    assert found[:, 0].tolist() == [3, 4, 5]
