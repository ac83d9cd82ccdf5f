"""The loader with a planner that draws its steps: every sample once, checks of what is drawn, no length."""

from __future__ import annotations

import re
import tracemalloc
import warnings
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import IntArray
from lightning_dcp.data.feeding import Planned, tasks
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.data.planning import samples_of
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.lengths import length_groups
from lightning_dcp.plan import IterationPlan, MicroBatch, PlanError
from lightning_dcp.planners import Floating
from lightning_dcp.planners.grouped import DCPInter
from lightning_dcp.planners.protocol import DrawingPlanner, PlanRequest
from lightning_dcp.topology import World
from tests.data_tools import LENGTHS, RoundRobin, Tokens, TokensModule, context, ids_of, loader_of
from tests.drawing_tools import Drawing

ALL = list(range(len(LENGTHS)))


def _loader(rank: int = 0, world_size: int = 1, planner: Any = None, **arguments: Any) -> DCPLoader:
    return loader_of(TokensModule(Tokens(LENGTHS), **arguments), rank, world_size, planner or Drawing())


def _steps(loader: DCPLoader, mark: bool = False) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(ids_of(batch))
        if mark:
            loader.mark_consumed(batch)
    return found


def _flat(steps: list[list[int]]) -> list[int]:
    return sorted(chain(*steps))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_sample_once_per_epoch(world_size: int, num_workers: int) -> None:
    loaders = [_loader(rank, world_size, num_workers=num_workers, prefetch_steps=3) for rank in range(world_size)]
    for epoch in range(3):
        found = []
        for batches in zip(*loaders, strict=True):
            assert {batch.epoch for batch in batches} == {epoch}
            assert len({batch.plan.iteration.digest() for batch in batches}) == 1
            found.append([i for batch in batches for i in ids_of(batch)])
            for loader, batch in zip(loaders, batches, strict=True):
                loader.mark_consumed(batch)
        assert _flat(found) == ALL
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
    assert loaders[0].consumed_samples == 3 * len(LENGTHS)
    assert loaders[0].consumed_tokens == 3 * sum(LENGTHS)
    for loader in loaders:
        loader.close()


def test_the_planner_is_offered_the_next_samples_of_the_permutation() -> None:
    planner = Drawing(lookahead=5)
    loader = _loader(planner=planner, shuffle=False)
    assert _steps(loader) == [[0, 2, 4], [1, 5, 7], [3, 8, 10], [6], [9]][: len(planner.offered)]
    assert planner.offered[:3] == [(0, 1, 2, 3, 4), (1, 3, 5, 6, 7), (3, 6, 8, 9, 10)]
    assert planner.offered[3:] == [(6, 9), (9,)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resume_after_every_step(num_workers: int) -> None:
    """lhotse-speech/lhotse#417: what was planned ahead is planned again."""
    whole = _steps(_loader())
    running = _loader(num_workers=num_workers, prefetch_steps=3)
    resumed = _loader(num_workers=num_workers)
    for done, batch in enumerate(running):
        resumed.load_state_dict(running.state_dict())
        assert _steps(resumed) == whole[done:]
        assert batch.step == done
        running.mark_consumed(batch)
    resumed.load_state_dict(running.state_dict())
    assert {batch.epoch for batch in resumed} == {1}
    running.close()
    resumed.close()


@pytest.mark.parametrize("other", [Drawing(9, 3, 2), Drawing(4, 1, 4), RoundRobin(3)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_another_planner_and_other_ranks_train_the_rest_once(other: Any, world_size: int) -> None:
    """meta-pytorch/torchft#292."""
    running = _loader()
    done: list[int] = []
    for batch in running:
        rest: list[list[int]] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for rank in range(world_size):
                loader = _loader(rank, world_size, other, **({} if other.draws else {"global_batch_size": 4}))
                loader.load_state_dict(running.state_dict())
                rest += _steps(loader)
        assert _flat([*rest, done]) == ALL
        assert [str(w.message) for w in caught if "the rest of the epoch is trained" in str(w.message)] == (
            []
            if other.draws
            else ["The steps of the saved run were drawn by the planner, those of this run are fixed by "
                  "global_batch_size = 4: the rest of the epoch is trained, each sample once, but in other steps than "
                  "the saved run would have made"] * world_size
        )  # fmt: skip
        running.mark_consumed(batch)
        done += ids_of(batch)


def test_how_far_steps_stray() -> None:
    loader = _loader(planner=Drawing(lookahead=5), shuffle=False)
    seen = []
    for batch in loader:
        loader.mark_consumed(batch)
        seen.append((round(loader.stray.mean, 3), loader.stray.maximum))
    # [0 2 4] as 0 1 2; [1 5 7] as 3 4 5; [3 8 10] as 6 7 8; [6] as 9; [9] as 10.
    assert seen == [(1.0, 2), (1.667, 2), (2.0, 3), (3.0, 3), (1.0, 1)]


def test_no_length_as_soon_as_the_planner_is_known() -> None:
    loader = TokensModule(Tokens(LENGTHS), global_batch_size=4).train_dataloader()
    assert len(loader) == 3
    with pytest.warns(
        UserWarning, match='do not decide the steps: planner "drawing" draws the samples of each step'
    ):
        loader.announce(Drawing())
    with pytest.raises(TypeError, match=r"set Trainer\(max_steps="):
        len(loader)
    with pytest.raises(RuntimeError, match=r"no planner yet.*draws.*Trainer\(max_steps="):
        next(iter(loader))


def test_a_size_that_does_not_decide_is_named_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = TokensModule(Tokens(LENGTHS), global_batch_tokens=9).train_dataloader()
        for _ in range(3):
            loader.announce(Drawing())
            loader.bind(context(planner=Drawing()))
    assert len([w for w in caught if "global_batch_tokens = 9 do not decide" in str(w.message)]) == 1


def test_a_fixed_planner_needs_a_size() -> None:
    loader = TokensModule(Tokens(LENGTHS)).train_dataloader()
    sentence = (
        'planner "round-robin" plans the samples that it is given, .*give exactly one of them to DCPDataModule'
    )
    with pytest.raises(ValueError, match=sentence):
        loader.announce(RoundRobin())
    with pytest.raises(ValueError, match=sentence):
        loader.bind(context())
    loader.bind(context(planner=Drawing()))
    assert _flat(_steps(loader)) == ALL


class Wrong(Drawing):
    """Plans other samples than it should."""

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.chosen = chosen

    def plan(self, request: PlanRequest) -> IterationPlan:
        ids = np.asarray(self.chosen(request.ids), dtype=np.int64)
        return RoundRobin.plan(
            self, replace(request, sample_ids=ids, shapes=np.ones((len(ids), 1), dtype=np.int64))
        )


@pytest.mark.parametrize(
    ("planner", "sentence"),
    [
        (
            Wrong(lambda ids: ids[1:3]),
            "for 1 ranks that lacks the first offered sample, {first}; it must draw that one",
        ),
        (Wrong(lambda ids: ()), "for 1 ranks that lacks the first offered sample, {first}; it must draw that one"),
        (Wrong(lambda ids: (*ids[:2], 77)), "for 1 ranks that has the samples [77], which were not offered"),
        (Wrong(lambda ids: (ids[0], *sorted(set(ALL) - set(ids)))), "which were not offered"),
    ],
)
def test_what_may_be_drawn(planner: Wrong, sentence: str) -> None:
    loader = _loader(planner=planner)
    first = int(StepSampler(np.asarray(LENGTHS), global_batch_size=1).samples(0, 0)[0])
    with pytest.raises(PlanError, match=re.escape(sentence.format(first=first))):
        next(iter(loader))


class Elsewhere(Drawing):
    def plan(self, request: PlanRequest) -> IterationPlan:
        return replace(super().plan(request), world_size=2)


class Lockstep(Drawing):
    def plan(self, request: PlanRequest) -> IterationPlan:
        return replace(super().plan(request), lockstep=True)


class Packing(Drawing):
    def plan(self, request: PlanRequest) -> IterationPlan:
        plan = super().plan(request)
        m = plan.micro_batches[0]
        row = replace(m, packed=True, padded_shape=(sum(shape[0] for shape in m.shapes),))
        return replace(plan, micro_batches=(row, *plan.micro_batches[1:]))


@pytest.mark.parametrize(
    ("planner", "sentence"),
    [
        (Elsewhere(), "gave a plan for 2 ranks that does not fit this run of 1 ranks"),
        (
            Packing(),
            "with a packed row of several samples; such plans can be made and simulated but not trained yet",
        ),
        (Lockstep(), "gave a plan for 1 ranks that is in lockstep, which this engine does not run"),
    ],
)
def test_what_a_run_cannot_have_is_refused_on_every_rank(planner: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        next(iter(_loader(planner=planner)))


def test_a_planner_that_does_not_say_how_far_it_looks() -> None:
    class Blind(RoundRobin):
        draws = True

    assert not isinstance(Blind(), DrawingPlanner)
    loader = TokensModule(Tokens(LENGTHS)).train_dataloader()
    for planner, wants in ((Blind(), None), (Drawing(lookahead=0), 0)):
        with pytest.raises(
            ValueError, match=f"wants {wants} samples to choose from; lookahead.* an integer from 1"
        ):
            loader.announce(planner)


def test_bounds_of_a_floating_step_come_from_the_number_of_samples() -> None:
    """Half and twice of it; then it is not given in vain. Tokens are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = _loader(planner=Floating(), global_batch_size=4, shuffle=False)
    steps = _steps(loader)
    assert _flat(steps) == ALL
    assert all(2 <= len(ids) <= 8 for ids in steps)
    assert [min(ids) for ids in steps] == sorted(min(ids) for ids in steps)
    with pytest.raises(TypeError, match="draws the samples"):
        len(loader)
    with pytest.warns(UserWarning, match="global_batch_size = 4 .* do not decide the steps"):
        _loader(planner=Floating(min_samples=3, max_samples=3), global_batch_size=4)
    for size in ({}, {"global_batch_tokens": 20}):
        with pytest.raises(ValueError, match="how many samples a step may have is not said"):
            _loader(planner=Floating(), **size)


def test_length_groups_are_those_of_the_dataset() -> None:
    loader = _loader(planner=DCPInter(length_groups=3))
    assert loader._bound().planner == DCPInter(length_groups=3, edges=length_groups(np.asarray(LENGTHS), 3))
    assert _flat(_steps(loader)) == ALL


def test_errors_of_planning_come_when_their_step_comes() -> None:
    class Late(Drawing):
        def plan(self, request: PlanRequest) -> IterationPlan:
            if len(self.offered) == 2:
                raise PlanError("no third step")
            return super().plan(request)

    loader = _loader(planner=Late(), num_workers=1, prefetch_steps=4)
    iterator = iter(loader)
    assert [next(iterator).step for _ in range(2)] == [0, 1]
    with pytest.raises(PlanError, match="no third step"):
        next(iterator)
    loader.close()


def test_a_small_step_is_no_fault_of_a_size_that_does_not_decide() -> None:
    class Known:
        planner = Drawing()

    class Surroundings:
        strategy, world_size, overfit_batches = Known(), 8, 0
        state = type("State", (), {"fn": None})()

    module = DCPDataModule(2)
    module.trainer = Surroundings()  # type: ignore[assignment]
    module.train_dataset = Tokens(LENGTHS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = module.train_dataloader()
    assert [str(w.message) for w in caught if "samples for 8 ranks" in str(w.message)] == []
    with pytest.raises(TypeError, match="draws the samples"):
        len(loader)


class Flat:
    """Plans without looking at more than the ids."""

    name, draws, lockstep = "flat", True, False

    def lookahead(self, world: World) -> int:
        return 64 * world.world_size

    def plan(self, request: PlanRequest) -> IterationPlan:
        ids = tuple(request.sample_ids[: 2 * request.world.world_size : 2].tolist())
        shapes = ((1,),) * len(ids)
        row = MicroBatch(
            sample_ids=ids, shapes=shapes, padded_shape=(1,), first_rank=0, sp_size=1, nanoseconds=1, bytes=0
        )
        return IterationPlan(world_size=request.world.world_size, micro_batches=(row,))


def _peak(size: int) -> int:
    """Most bytes that planning and marking some steps allocate, behind the first one."""
    sampler = StepSampler(np.ones(size, dtype=np.int64))
    planned: deque[Planned] = deque()
    given = replace(context(planner=Flat()), world=World.build(1024, [1]))
    feed = tasks(given, sampler, np.ones((size, 1), dtype=np.int64), planned)
    epoch, step = sampler.begin()
    next(feed)
    sampler.mark_consumed(epoch, step, samples_of_plan(planned.popleft()))
    tracemalloc.start()
    for step in range(1, 4):
        next(feed)
        sampler.mark_consumed(epoch, step, samples_of_plan(planned.popleft()))
        assert len(sampler.state_dict()["beyond"]) > 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def samples_of_plan(head: Planned) -> IntArray:
    assert head.plan is not None, head.error
    return samples_of(head.plan)


def test_a_step_costs_nothing_of_the_epoch() -> None:
    """1,000,000 samples on 1,024 ranks: what a step needs lies in its window of 65,536 samples."""
    small, large = _peak(125_000), _peak(1_000_000)
    assert large < 1.1 * small
    assert large < 8 * 1_000_000, "less than one number for each sample of the epoch"
