"""The train loader: every sample once, whatever ranks and workers; random numbers; failures as text."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dcp.data.batch import Batch, DCPBatch
from lightning_dcp.data.feeding import tasks
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.data.reading import ReadError
from lightning_dcp.plan import IterationPlan, MicroBatch, PlanError
from lightning_dcp.planners.protocol import InfeasibleError, PlanRequest
from lightning_dcp.seeding import seed_from
from tests.data_tools import (
    LENGTHS,
    RoundRobin,
    Tokens,
    TokensModule,
    context,
    generator_states,
    ids_of,
    loader_of,
)

SIZES = [{"global_batch_size": 4}, {"global_batch_tokens": 20}]


def _loader(rank: int = 0, world_size: int = 1, planner: Any = None, **arguments: Any) -> DCPLoader:
    dataset = arguments.pop("dataset", None) or Tokens(LENGTHS)
    if "global_batch_tokens" not in arguments:
        arguments.setdefault("global_batch_size", 4)
    return loader_of(TokensModule(dataset, **arguments), rank, world_size, planner)


def _steps(loader: DCPLoader) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_once_per_epoch(size: dict[str, int], num_workers: int, world_size: int) -> None:
    """NVlabs/LongLive#71, huggingface/trl#4579: the ranks together see each sample once.

    webdataset/webdataset#382: each rank's loader has the length of what it gives, where all epochs have the same.
    """
    loaders = [_loader(rank, world_size, num_workers=num_workers, **size) for rank in range(world_size)]
    single = _loader(**size)
    for epoch in range(2):
        for loader in (*loaders, single):
            loader.sampler.set_epoch(epoch)
        steps = [[ids_of(batch) for batch in loader] for loader in loaders]
        if "global_batch_size" in size:
            assert [len(loader) for loader in loaders] == [len(given) for given in steps]
        content = [sorted(chain(*parts)) for parts in zip(*steps, strict=True)]
        assert sorted(chain(*content)) == list(range(len(LENGTHS)))
        assert content == [sorted(ids) for ids in _steps(single)]
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("sp_size", [2, 4])
def test_all_ranks_of_a_group_get_the_same_whole_batch(sp_size: int) -> None:
    """deepspeedai/DeepSpeed#7484, axolotl-ai-cloud/axolotl#3920: equal in a group, not between."""
    loaders = [_loader(rank, 4, RoundRobin(sp_size=sp_size), num_workers=rank % 2) for rank in range(4)]
    for batches in zip(*loaders, strict=True):
        groups: dict[int, list[Batch]] = {}
        for rank, batch in enumerate(batches):
            groups.setdefault(rank // sp_size, []).extend(batch.data[:1])
        for members in groups.values():
            for other in members[1:]:
                assert set(other) == set(members[0])
                for key, value in members[0].items():
                    same = (
                        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
                    )
                    assert same, key
        draws = [members[0]["collate_draw"] for members in groups.values() if members]
        assert len({tuple(draw) for draw in draws}) == len(draws)
    for loader in loaders:
        loader.close()


def test_collate_draws_follow_the_samples_when_groups_change() -> None:
    """axolotl-ai-cloud/axolotl#3920: draws are the same after regrouping, not in other steps."""
    seen = []
    for sp_size in (1, 2):
        loader = _loader(0, 2, RoundRobin(batch_size=4, sp_size=sp_size))
        seen.append([batch.data[0]["collate_draw"] for batch in loader])
    assert seen[0] == seen[1]
    assert len({tuple(draw) for draw in seen[0]}) == len(seen[0])
    for step, draws in enumerate(seen[0]):
        with isolated():
            seed_global(seed_from(0, 0, step, int(loader.sampler.samples(0, step)[0])))
            assert draws == [float(torch.rand(())), float(np.random.rand()), random.random()]


def _worker_init(worker: int) -> None:
    torch.manual_seed(1000 + worker)
    np.random.seed(1000 + worker)
    random.seed(1000 + worker)


def _draws(loaders: Sequence[DCPLoader], epoch: int) -> dict[int, list[float]]:
    found = {}
    for loader in loaders:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            assert batch.error is None, batch.error
            for data in batch.data:
                for sample, draws in zip(data["index"].tolist(), data["draws"].tolist(), strict=True):
                    found[sample] = draws
        loader.close()
    return found


def test_draws_of_samples_depend_on_neither_ranks_nor_workers() -> None:
    """NVIDIA-BioNeMo/nvSubquadratic#140: a worker_init_fn cannot make samples or ranks draw the same numbers."""
    reference = _draws([_loader()], 0)
    assert sorted(reference) == list(range(len(LENGTHS)))
    flat = [value for draws in reference.values() for value in draws]
    assert len(set(flat)) == len(flat)
    for world_size, options in (
        (1, {"num_workers": 1}),
        (1, {"num_workers": 3, "worker_init_fn": _worker_init}),
        (2, {"num_workers": 2, "worker_init_fn": _worker_init, "shuffle": False}),
        (3, {"global_batch_size": 7}),
    ):
        assert _draws([_loader(r, world_size, **options) for r in range(world_size)], 0) == reference
    other = _draws([_loader()], 1)
    assert not {v for d in other.values() for v in d} & set(flat)
    assert not {v for d in _draws([_loader(seed=1)], 0).values() for v in d} & set(flat)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_global_generators_are_left_alone(num_workers: int) -> None:
    loader = _loader(num_workers=num_workers)
    torch.manual_seed(5)
    before = generator_states()
    _steps(loader)
    loader.load(_micro_batch(2), 0, 0)
    assert generator_states() == before
    loader.close()


def _micro_batch(*ids: int) -> MicroBatch:
    shapes = tuple((LENGTHS[i],) for i in ids)
    return MicroBatch(
        sample_ids=ids, shapes=shapes, padded_shape=max(shapes), first_rank=0, sp_size=1, nanoseconds=0, bytes=0
    )


def test_load_gives_what_a_step_gives() -> None:
    loader = _loader(num_workers=1)
    for batch in loader:
        for micro_batch, data in zip(batch.plan.iteration.of_rank(0), batch.data, strict=True):
            again = loader.load(micro_batch, batch.epoch, batch.step)
            assert torch.equal(again["draws"], data["draws"])
            assert again["collate_draw"] == data["collate_draw"]
            assert torch.equal(again["input_ids"], data["input_ids"])
    loader.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resume_after_every_step(size: dict[str, int], num_workers: int) -> None:
    """lhotse-speech/lhotse#417: the state counts what was consumed, whatever was read ahead."""
    whole = _steps(_loader(**size))
    running = _loader(num_workers=num_workers, prefetch_steps=3, **size)
    resumed = _loader(num_workers=num_workers, **size)
    for done, batch in enumerate(running):
        resumed.load_state_dict(running.state_dict())
        assert _steps(resumed) == whole[done:]
        running.mark_consumed(batch)
    assert done == len(whole) - 1
    resumed.load_state_dict(running.state_dict())
    epochs = {batch.epoch for batch in resumed}
    assert epochs == {1}
    running.close()
    resumed.close()


def test_resume_on_another_number_of_ranks() -> None:
    """meta-pytorch/torchft#292: the position is global, so 4 ranks can go on as 2 or 1."""
    whole = _steps(_loader())
    stopped = [_loader(rank, 4) for rank in range(4)]
    states = []
    for loader in stopped:
        loader.mark_consumed(next(iter(loader)))
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for world_size in (1, 2, 3):
        rest: list[int] = []
        for rank in range(world_size):
            loader = _loader(rank, world_size, RoundRobin(batch_size=3))
            loader.load_state_dict(states[0])
            rest += chain(*_steps(loader))
        assert sorted(rest + whole[0]) == list(range(len(LENGTHS)))


def test_the_next_epoch_follows_in_a_plain_loop() -> None:
    loader = _loader(num_workers=1)
    seen = []
    for _ in range(3):
        for batch in loader:
            seen.append((batch.epoch, batch.step))
            loader.mark_consumed(batch)
    assert seen == [(epoch, step) for epoch in range(3) for step in range(3)]
    assert (loader.consumed_samples, loader.consumed_tokens) == (33, 3 * sum(LENGTHS))
    loader.close()


def test_everything_is_decided_at_the_first_next() -> None:
    module = TokensModule(Tokens(LENGTHS), global_batch_size=4)
    loader = module.train_dataloader()
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"binds it in setup. Under another strategy a DCPDataModule does not"):
        next(iterator)
    loader.bind(context())
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 2, "position": 4})
    batch = next(iterator)
    assert (batch.epoch, batch.step) == (2, 1)
    assert ids_of(batch) == loader.sampler.samples(2, 1).tolist()


def test_a_pass_that_is_out_of_date_says_so() -> None:
    loader = _loader()
    iterator = iter(loader)
    next(iterator)
    loader.sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"epoch or the position of the loader was set after its first step"):
        next(iterator)
    other = iter(loader)
    assert next(other).epoch == 1
    newest = iter(loader)
    next(newest)
    with pytest.raises(RuntimeError, match="a newer iterator of this loader is in use"):
        next(other)


def test_an_abandoned_pass_leaves_nothing_behind() -> None:
    """With persistent workers, steps that were read ahead must not turn up in the next pass."""
    whole = _steps(_loader())
    loader = _loader(num_workers=2, prefetch_steps=4)
    for _ in range(3):
        assert ids_of(next(iter(loader))) == whole[0]
    assert _steps(loader) == whole
    loader.close()
    assert _steps(loader) == whole
    loader.close()


class Failing(Tokens):
    """Cannot read one of its samples."""

    def __init__(self, kind: str, sample: int = 5) -> None:
        super().__init__(LENGTHS)
        self.kind, self.sample = kind, sample

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        if index != self.sample:
            return found
        if self.kind == "raise":
            raise OSError("disk on fire")
        if self.kind == "stop":
            raise StopIteration
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return {**found, "input_ids": found["input_ids"][1:]}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("raise", "sample 5 could not be read: OSError: disk on fire"),
        ("stop", "sample 5 could not be read: StopIteration"),
        ("short", r"sample 5 was declared with shape (2,), but its data has {'input_ids': (1,)}"),
    ],
)
def test_a_failure_is_text_on_the_rank_that_has_it(kind: str, sentence: str, num_workers: int) -> None:
    loaders = [_loader(rank, 2, num_workers=num_workers, dataset=Failing(kind)) for rank in range(2)]
    errors: list[str] = []
    count = 0
    for step, batches in enumerate(zip(*loaders, strict=True)):
        count += 1
        for batch in batches:
            ids = [i for m in batch.plan.iteration.of_rank(batches.index(batch)) for i in m.sample_ids]
            assert (batch.error is None) == (5 not in ids)
            if batch.error is not None:
                assert batch.data == ()
                assert f"step {step} of epoch 0" in batch.error
                errors.append(batch.error)
    assert count == 3
    assert len(errors) == 1
    assert sentence in errors[0]
    assert "Traceback" in errors[0]
    assert "data_tools.py" in errors[0] or "test_data_loader.py" in errors[0] or "collate.py" in errors[0]
    for loader in loaders:
        loader.close()


def test_a_collate_that_raises_names_the_samples() -> None:
    class Broken(TokensModule):
        def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
            raise KeyError(f"labels of {len(samples)} samples, {micro_batch.batch_size} planned")

    loader = loader_of(Broken(Tokens(LENGTHS), global_batch_size=2))
    batch = next(iter(loader))
    ids = list(batch.plan.iteration.micro_batches[0].sample_ids)
    assert batch.error is not None
    assert f"samples {ids} could not be collated: KeyError: 'labels of 2 samples, 2 planned'" in batch.error
    with pytest.raises(ReadError, match="could not be collated"):
        loader.load(_micro_batch(3))


@pytest.mark.parametrize("returned", [None, [{}], 3])
def test_a_collate_that_returns_no_dict_is_named(returned: Any) -> None:
    class Broken(TokensModule):
        def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Any:
            return returned

    batch = next(iter(loader_of(Broken(Tokens(LENGTHS), global_batch_size=2))))
    assert batch.error is not None
    assert f"collate returned {type(returned).__name__} for the samples" in batch.error


def test_a_killed_worker_is_text_too() -> None:
    loader = _loader(num_workers=1, dataset=Failing("kill"))
    batch = next(iter(loader))
    assert batch.data == ()
    assert batch.error is not None
    assert f"step 0 of epoch 0, samples {loader.sampler.samples(0, 0).tolist()}" in batch.error
    assert "a worker process ended while samples were read" in batch.error


class Odd(Tokens):
    """Gives what cannot be sent to another process, or ends its worker in the middle."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "odd": (lambda: index) if index == 5 else index}


def test_what_a_worker_cannot_send_is_text_and_no_endless_wait() -> None:
    """torch drops such a batch in the worker, and the run waits for it for ever."""
    loader = _loader(num_workers=1, dataset=Odd(LENGTHS))
    errors = [batch.error for batch in loader if batch.error is not None]
    assert len(errors) == 1
    assert '"odd" of a batch cannot be sent from a worker process' in errors[0]
    assert "num_workers=0" in errors[0]
    loader.close()
    assert all(batch.error is None for batch in _loader(dataset=Odd(LENGTHS)))


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset by peer"), EOFError(), FileNotFoundError("no socket")]
)
def test_half_sent_data_of_a_dead_worker_is_text_too(error: Exception) -> None:
    """A worker that ends by itself (os._exit, sys.exit) may leave tensors that the main process cannot open."""

    def broken() -> Any:
        raise error
        yield

    loader = _loader()
    steps = iter(loader)
    assert next(steps).error is None
    steps._readings = broken()  # type: ignore[attr-defined]
    next(tasks(context(), loader.sampler, loader.shapes, steps._planned))  # type: ignore[attr-defined]
    batch = next(steps)
    assert batch.error is not None
    assert "a worker process ended while samples were read" in batch.error


class Stray(RoundRobin):
    """Changes one field of a valid plan's first micro-batch."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes

    def plan(self, request: PlanRequest) -> IterationPlan:
        plan = super().plan(request)
        return replace(
            plan, micro_batches=(replace(plan.micro_batches[0], **self.changes), *plan.micro_batches[1:])
        )


class Nothing(RoundRobin):
    def plan(self, request: PlanRequest) -> Any:
        return None


@pytest.mark.parametrize(
    ("planner", "limits", "sentence"),
    [
        (Nothing(), {}, "gave None; plan(request) must return an IterationPlan"),
        (
            Stray(first_rank=1, sp_size=2, padded_shape=(12,)),
            {},
            "the group (first_rank, sp_size) = (1, 2); allowed",
        ),
        (Stray(recompute=(3,)), {}, "recompute = (3,); allowed are counts from 0 up to (2,)"),
        (Stray(recompute=(1, 1)), {}, "recompute = (1, 1); allowed are counts from 0 up to (2,)"),
        (Stray(recompute=(1,)), {"recompute": "none"}, "recomputation is switched off"),
        (Stray(padded_shape=(64,)), {"exact_shapes": True}, "padding to (64,); padding is switched off"),
    ],
)
def test_a_plan_that_this_run_cannot_have_is_refused_where_it_is_made(
    planner: RoundRobin, limits: dict[str, Any], sentence: str
) -> None:
    """In the middle of a step only the ranks of the group would find out, and the others would wait."""
    for rank in range(4):
        loader = _loader(rank, 4, planner)
        given = context(rank, 4, planner)
        loader.bind(replace(given, limits=replace(given.limits, **limits)))
        with pytest.raises(PlanError, match=re.escape(sentence)):
            next(iter(loader))


def test_a_seed_of_any_size() -> None:
    assert sorted(i for ids in _steps(_loader(seed=10**30)) for i in ids) == list(range(len(LENGTHS)))


class Infeasible(RoundRobin):
    """Refuses one sample."""

    def plan(self, request: PlanRequest) -> IterationPlan:
        if 2 in request.sample_ids:
            raise InfeasibleError("sample 2 has 9 tokens; 8 fit")
        return super().plan(request)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plan_that_is_impossible_is_raised_on_every_rank_at_its_step(num_workers: int) -> None:
    """radixark/miles#2197: the error is the planner's own, equal on all ranks, and comes when its step comes."""
    for rank in range(2):
        loader = _loader(rank, 2, Infeasible(), num_workers=num_workers, prefetch_steps=4)
        whole = [loader.sampler.samples(0, step).tolist() for step in range(3)]
        bad = next(step for step, ids in enumerate(whole) if 2 in ids)
        assert bad > 0
        iterator = iter(loader)
        for step in range(bad):
            assert next(iterator).step == step
        with pytest.raises(InfeasibleError, match="sample 2 has 9 tokens; 8 fit"):
            next(iterator)
        loader.close()


def test_a_plan_that_loses_a_sample_is_refused() -> None:
    class Forgetful(RoundRobin):
        def plan(self, request: PlanRequest) -> IterationPlan:
            return IterationPlan(world_size=1, micro_batches=super().plan(request).micro_batches[1:])

    with pytest.raises(
        PlanError, match=r'planner "round-robin" gave a plan for 1 ranks that lacks the samples \[8, 9\]'
    ):
        next(iter(_loader(planner=Forgetful())))


def test_a_rank_without_a_micro_batch_gets_an_empty_step() -> None:
    loader = _loader(3, 4, num_workers=1)
    batches = list(loader)
    assert [batch.data for batch in batches] == [()] * 3
    assert [batch.error for batch in batches] == [None] * 3
    assert all(isinstance(batch, DCPBatch) and batch.plan.iteration.num_samples for batch in batches)
    loader.close()


def test_bad_options() -> None:
    for name, value, least in (("num_workers", -1, 0), ("prefetch_steps", 0, 1)):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be an integer of at least {least}"):
            TokensModule(Tokens(LENGTHS), global_batch_size=1, **{name: value})
