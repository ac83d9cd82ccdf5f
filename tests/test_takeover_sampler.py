"""Samplers that users bring: repeats, batches, dropped and left-out samples, and where they resume."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import IntArray
from lightning_dcp.data.order import Drawn, occurrences
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.data.steps import Given

TOKENS = np.asarray([5, 3, 9, 1, 7, 2, 8, 4, 6, 11, 10])


def repeating(epoch: int) -> Drawn:
    """Twenty places over eleven samples, so that some come again and some not at all."""
    return Drawn(np.random.default_rng(epoch).integers(0, len(TOKENS), size=20))


def batched(epoch: int) -> Drawn:
    """Seven batches of one to four samples."""
    samples = np.random.default_rng(epoch).permutation(len(TOKENS)).astype(np.int64)
    return Drawn(samples, np.asarray([0, 1, 1, 1, 1, 2, 3, 4, 5, 5, 6]))


def steps_of(sampler: StepSampler, count: int = 99, mark: bool = True) -> list[list[int]]:
    """The steps that are left of the epoch, marked as consumed up to a number of them."""
    epoch, first = sampler.begin()
    found = []
    for step in range(first, min(sampler.num_steps(epoch), first + count)):
        found.append(sampler.samples(epoch, step).tolist())
        sampler.mark_consumed(epoch, step)
    return found


def saved(sampler: StepSampler) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


def flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


def test_ids_of_repeated_samples_are_unique_and_name_the_sample() -> None:
    generator = np.random.default_rng(1)
    for _ in range(100):
        size = int(generator.integers(1, 9))
        samples: IntArray = generator.integers(0, size, size=int(generator.integers(0, 30)))
        ids = occurrences(samples, size)
        assert (ids % max(size, 1)).tolist() == samples.tolist()
        assert len(set(ids.tolist())) == len(ids)
        seen: dict[int, int] = {}
        for place, sample in enumerate(samples.tolist()):
            assert ids[place] // size == seen.get(sample, 0)
            seen[sample] = seen.get(sample, 0) + 1


@pytest.mark.parametrize("drawing", [False, True])
def test_an_order_with_repeats_is_trained_as_it_is_and_resumes_anywhere(drawing: bool) -> None:
    def made() -> StepSampler:
        sampler = StepSampler(TOKENS, global_batch_size=6, given=Given(draw=repeating, name="mine"))
        sampler.drawing = drawing
        return sampler

    def run(sampler: StepSampler, count: int = 99) -> list[list[int]]:
        if not drawing:
            return steps_of(sampler, count)
        epoch, first = sampler.begin()
        draw = sampler.draw()
        found: list[list[int]] = []
        while draw.left and len(found) < count:
            ids = draw.offer(8)[::2]
            draw.take(ids)
            sampler.mark_consumed(epoch, first + len(found), ids)
            found.append(ids.tolist())
        return found

    whole = made()
    epochs = [run(whole) for _ in range(2)]
    for epoch, steps in enumerate(epochs):
        assert sorted(i % 11 for i in flat(steps)) == sorted(repeating(epoch).samples.tolist())
        assert len(set(flat(steps))) == 20
    assert whole.consumed_samples == 40
    for stop in range(1, len(epochs[0])):
        first = made()
        assert run(first, stop) == epochs[0][:stop]
        assert first.counts().trained == len(flat(epochs[0][:stop]))
        second = made()
        second.load_state_dict(saved(first))
        assert run(second) == epochs[0][stop:]
        assert run(second) == epochs[1]


def test_a_sampler_that_changed_is_refused_by_name() -> None:
    """Other weights give another order: samples would be lost or repeated without a word."""
    first = StepSampler(TOKENS, global_batch_size=6, given=Given(draw=repeating, name="mine"))
    steps_of(first, 1)
    other = Given(draw=lambda epoch: repeating(epoch + 1), name="mine")
    with pytest.raises(ValueError, match="saved position has order = "):
        StepSampler(TOKENS, global_batch_size=6, given=other).load_state_dict(saved(first))
    with pytest.raises(ValueError, match="saved position has sampler = 'mine', this run has 'other'"):
        StepSampler(TOKENS, global_batch_size=6, given=Given(draw=repeating, name="other")).load_state_dict(
            saved(first)
        )
    with pytest.raises(ValueError, match="sampler"):
        StepSampler(TOKENS, global_batch_size=6, given=Given(draw=repeating, name="mine")).load_state_dict(
            saved(StepSampler(TOKENS, global_batch_size=6))
        )


@pytest.mark.parametrize("batches", [1, 2, 3, 9])
def test_batches_of_others_are_steps_also_on_another_number_of_ranks(batches: int) -> None:
    def given(count: int) -> Given:
        return Given(draw=batched, name="buckets", batches_per_step=count, per_rank=1)

    whole = StepSampler(TOKENS, given=given(batches))
    samples, numbers, _ = batched(0)
    assert numbers is not None
    expected = [
        [int(s) for s, b in zip(samples, numbers, strict=True) if b // batches == step]
        for step in range(-(-7 // batches))
    ]
    assert len(whole) == len(expected)
    steps = steps_of(whole)
    assert steps == expected
    for stop in range(1, len(steps)):
        first = StepSampler(TOKENS, given=given(batches))
        steps_of(first, stop)
        second = StepSampler(TOKENS, given=given(batches + 1))
        with pytest.warns(UserWarning, match=f"hold {batches} batches.*would make steps of {batches + 1}"):
            second.load_state_dict(saved(first))
        assert steps_of(second) == steps[stop:]


def test_samples_per_rank_resume_with_the_steps_of_the_saved_run() -> None:
    """meta-pytorch/torchft#292: two samples on each of four ranks go on as eight on two ranks."""
    first = StepSampler(TOKENS, global_batch_size=4, given=Given(per_rank=2))
    steps = steps_of(first, 1)
    second = StepSampler(TOKENS, global_batch_size=2, given=Given(per_rank=2))
    with pytest.warns(UserWarning, match="hold 4 samples.*would make steps of 2"):
        second.load_state_dict(saved(first))
    assert len(second) == 3
    assert steps + steps_of(second) == steps_of(StepSampler(TOKENS, global_batch_size=4))
    with pytest.raises(ValueError, match="samples_per_rank = 2, this run has 3"):
        StepSampler(TOKENS, global_batch_size=6, given=Given(per_rank=3)).load_state_dict(saved(first))


def test_a_reloaded_loader_keeps_the_steps_of_the_saved_run() -> None:
    first = StepSampler(TOKENS, global_batch_size=4, given=Given(per_rank=2))
    steps_of(first, 1)
    resumed = StepSampler(TOKENS, global_batch_size=2, given=Given(per_rank=2))
    with pytest.warns(UserWarning, match="The run goes on with 4"):
        resumed.load_state_dict(saved(first))
    reloaded = StepSampler(TOKENS, global_batch_size=2, given=Given(per_rank=2))
    reloaded.set_epoch(1)
    reloaded.go_on_from(resumed)
    assert (len(reloaded), reloaded.epoch, reloaded.consumed_samples) == (3, 1, 4)
    other = StepSampler(TOKENS, global_batch_size=6, given=Given(per_rank=3))
    other.go_on_from(resumed)
    assert other.global_batch_size == 6


def test_drop_last_ends_with_the_last_whole_step() -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4, given=Given(drop_last=True))
    whole = StepSampler(TOKENS, global_batch_size=4)
    assert len(sampler) == 2
    for epoch in range(2):
        assert steps_of(sampler) == steps_of(whole)[:2]
        assert sampler.epoch == epoch
        counts = sampler.counts()
        assert (counts.planned, counts.trained, counts.left) == (11, 8, 3)
    resumed = StepSampler(TOKENS, global_batch_size=4, given=Given(drop_last=True))
    resumed.load_state_dict(saved(sampler))
    assert resumed.begin() == (2, 0)


@pytest.mark.parametrize("drawing", [False, True])
def test_left_out_samples_are_in_no_epoch_and_none_is_lost_when_they_change(drawing: bool) -> None:
    def made(left_out: list[int]) -> StepSampler:
        sampler = StepSampler(TOKENS, global_batch_size=3)
        sampler.leave_out(np.asarray(left_out, dtype=np.int64))
        return sampler

    first = made([2, 9])
    assert len(first) == 3
    done = steps_of(first, 2)
    assert sorted(flat(done) + flat(steps_of(made([2, 9]))[2:])) == [0, 1, 3, 4, 5, 6, 7, 8, 10]
    stopped = made([2, 9])
    steps_of(stopped, 2)
    counts = stopped.counts()
    assert (counts.planned, counts.trained, counts.left, counts.left_out) == (9, 6, 3, 2)
    assert stopped.left_out.tolist() == [2, 9]

    same = made([2, 9])
    same.load_state_dict(saved(stopped))
    assert steps_of(same) == steps_of(made([2, 9]))[2:]

    late = StepSampler(TOKENS, global_batch_size=3)
    late.load_state_dict(saved(stopped))  # the planner is bound after the state was loaded
    late.leave_out(np.asarray([2, 9]))
    assert steps_of(late) == steps_of(made([2, 9]))[2:]

    for others in ([], [2], [flat(done)[0], 9], [int(i) for i in range(11) if i not in flat(done)][:3]):
        second = made(others)
        second.drawing = drawing
        with pytest.warns(UserWarning, match="left out now, others than in the saved run"):
            second.load_state_dict(saved(stopped))
        rest = second.draw().offer(99).tolist() if drawing else flat(steps_of(second))
        wanted = set(range(11)) - set(flat(done)) - set(others)
        assert sorted(rest) == sorted(wanted)


def test_all_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="all 11 samples"):
        StepSampler(TOKENS, global_batch_size=3).leave_out(np.arange(11))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_integers_of_numpy_are_integers(kind: Any) -> None:
    sampler = StepSampler(TOKENS, global_batch_size=kind(4), seed=kind(1))
    assert type(sampler.global_batch_size) is int
    assert type(saved(sampler)["seed"]) is int
    wrong: Any
    for wrong in (True, np.bool_(True), 2.0, np.float64(2), "2", kind(0)):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            StepSampler(TOKENS, global_batch_size=wrong)
