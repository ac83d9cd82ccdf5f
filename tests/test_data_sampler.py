"""The order of samples, its cut into steps, and the saved position."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import IntArray
from lightning_dcp.data.cutting import cut_by_samples, cut_by_tokens
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.permutation import permutation

TOKENS = np.asarray([5, 3, 9, 1, 7, 2, 8, 4, 6, 11, 10])


def _steps(sampler: StepSampler) -> list[list[int]]:
    return [ids.tolist() for ids in sampler]


def _consume(sampler: StepSampler, count: int) -> None:
    epoch, first = sampler.begin()
    for step in range(first, first + count):
        sampler.mark_consumed(epoch, step)


def test_permutation_is_pinned() -> None:
    """A resumed run must find the order of the first one, whatever NumPy is installed by then."""
    assert permutation(0, 0, 8).tolist() == [1, 7, 0, 4, 3, 6, 5, 2]
    assert permutation(7, 2, 8).tolist() == [1, 7, 4, 2, 5, 0, 6, 3]


def test_permutation_depends_on_everything_and_is_fair() -> None:
    """Lightning-AI/pytorch-lightning#13316: each epoch has its own order, the same on every rank."""
    orders = {tuple(permutation(s, e, 50).tolist()) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    firsts = np.bincount([permutation(1, e, 10)[0] for e in range(3000)], minlength=10)
    # Each of ten samples comes first in 300 of 3000 epochs; six standard deviations are 99.
    assert np.abs(firsts - 300).max() < 99


@pytest.mark.parametrize(("size", "per_step"), [(1, 1), (5, 2), (6, 2), (6, 100), (7, 7)])
def test_cut_by_samples(size: int, per_step: int) -> None:
    bounds = cut_by_samples(size, per_step)
    assert bounds[0] == 0
    assert bounds[-1] == size
    widths = np.diff(bounds)
    assert (widths[:-1] == per_step).all()
    assert 1 <= widths[-1] <= per_step


def test_cut_by_tokens_against_a_plain_loop() -> None:
    generator = np.random.default_rng(3)
    for _ in range(200):
        tokens = generator.integers(1, 30, size=generator.integers(1, 40))
        budget = int(generator.integers(1, 80))
        expected, spent = [0], 0
        for index, length in enumerate(tokens.tolist()):
            if index > expected[-1] and spent + length > budget:
                expected.append(index)
                spent = 0
            spent += length
        assert cut_by_tokens(tokens, budget).tolist() == [*expected, len(tokens)]


def test_a_step_ends_exactly_at_its_budget() -> None:
    assert cut_by_tokens(np.asarray([4, 6, 5, 5, 1, 20, 1]), 10).tolist() == [0, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("size", [{"global_batch_size": 4}, {"global_batch_tokens": 20}])
@pytest.mark.parametrize("shuffle", [True, False])
def test_length_is_the_number_of_steps(size: dict[str, Any], shuffle: bool) -> None:
    """lhotse-speech/lhotse#212: the length counts what an epoch yields."""
    sampler = StepSampler(TOKENS, shuffle=shuffle, **size)
    steps = _steps(sampler)
    assert sorted(i for ids in steps for i in ids) == list(range(11))
    assert sampler.num_steps(0) == len(steps)
    if shuffle and "global_batch_tokens" in size:
        with pytest.raises(TypeError, match="differs between epochs"):
            len(sampler)
    else:
        assert len(sampler) == len(steps)


def test_no_shuffle_keeps_the_order_of_the_dataset() -> None:
    sampler = StepSampler(TOKENS, shuffle=False, global_batch_size=4)
    assert _steps(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    sampler.set_epoch(3)
    assert _steps(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("size", [{"global_batch_size": 4}, {"global_batch_tokens": 20}])
def test_state_after_each_step_leads_to_the_rest(size: dict[str, Any]) -> None:
    """verl-project/verl#7401, meta-pytorch/data#1439: behind the last step comes the next epoch, in full."""
    epochs = []
    for epoch in range(2):
        whole = StepSampler(TOKENS, **size)
        whole.set_epoch(epoch)
        epochs.append(_steps(whole))
    for done in range(len(epochs[0]) + 1):
        sampler = StepSampler(TOKENS, **size)
        _consume(sampler, done)
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = StepSampler(TOKENS, **size)
        resumed.load_state_dict(state)
        assert _steps(resumed) == (epochs[0][done:] or epochs[1])
        # A trainer that repeats the number of the epoch, or goes on to the next, finds the same.
        resumed.set_epoch(0)
        assert _steps(resumed) == (epochs[0][done:] or epochs[1])
        resumed.set_epoch(1)
        assert _steps(resumed) == epochs[1]


def test_state_after_exhaustion_without_loading() -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4)
    first = _steps(sampler)
    _consume(sampler, 3)
    second = _steps(sampler)
    assert second != first
    assert sampler.epoch == 1
    assert sorted(i for ids in second for i in ids) == list(range(11))


def test_drawing_changes_no_state() -> None:
    """lhotse-speech/lhotse#417: what is drawn ahead is not consumed."""
    sampler = StepSampler(TOKENS, global_batch_size=4)
    before = sampler.state_dict()
    _steps(sampler)
    assert sampler.state_dict() == before


def test_where_to_start_is_decided_late() -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4)
    iterator = iter(sampler)
    sampler.set_epoch(5)
    assert next(iterator).tolist() == sampler.samples(5, 0).tolist()


def test_another_epoch_starts_at_its_beginning() -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4)
    _consume(sampler, 2)
    sampler.set_epoch(0)
    assert sampler.position == 8
    sampler.set_epoch(1)
    assert sampler.position == 0


def test_counters() -> None:
    """Lightning-AI/pytorch-lightning#21491: counters of samples and tokens are true and saved."""
    sampler = StepSampler(TOKENS, global_batch_tokens=20)
    ids: list[int] = []
    for epoch in range(2):
        for step in range(sampler.num_steps(epoch)):
            ids += sampler.samples(epoch, step).tolist()
            sampler.begin()
            sampler.mark_consumed(epoch, step)
            assert sampler.consumed_samples == len(ids)
            assert sampler.consumed_tokens == int(TOKENS[ids].sum())
    resumed = StepSampler(TOKENS, global_batch_tokens=20)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.consumed_samples, resumed.consumed_tokens) == (22, 132)


@pytest.mark.parametrize(
    ("field", "tokens", "arguments"),
    [
        ("seed = 0, this run has 1", TOKENS, {"seed": 1, "global_batch_size": 4}),
        ("num_samples = 11, this run has 10", TOKENS[:10], {"global_batch_size": 4}),
        ("num_tokens = 66, this run has 67", TOKENS + (np.arange(11) == 0), {"global_batch_size": 4}),
        ("shuffle = True, this run has False", TOKENS, {"shuffle": False, "global_batch_size": 4}),
        ("global_batch_size = 4, this run has 5", TOKENS, {"global_batch_size": 5}),
        ("global_batch_size = 4, this run has None", TOKENS, {"global_batch_tokens": 20}),
    ],
)
def test_a_foreign_state_is_refused_by_name(field: str, tokens: IntArray, arguments: dict[str, Any]) -> None:
    state = StepSampler(TOKENS, global_batch_size=4).state_dict()
    with pytest.raises(ValueError, match=field):
        StepSampler(tokens, **arguments).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position": 3}, "position is 3 .* where no step of epoch 0 starts"),
        ({"position": -4}, "position is -4; it must be an integer of at least 0"),
        ({"epoch": "0"}, "epoch is '0'; it must be an integer"),
        ({"epoch": None}, "epoch is None; it must be an integer"),
        ({"beyond": [7]}, r"with \[7\] beyond it"),
        ({"version": 2}, "version = 2, this run has 1"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, object], sentence: str) -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=sentence):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_a_step_is_consumed_once_and_in_order() -> None:
    sampler = StepSampler(TOKENS, global_batch_size=4)
    _consume(sampler, 2)
    for epoch, step in ((0, 1), (0, 3), (0, -1), (1, 0)):
        with pytest.raises(
            RuntimeError, match=f"step {step} of epoch {epoch} was marked as consumed, but 8 of 11"
        ):
            sampler.mark_consumed(epoch, step)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"global_batch_size": 4, "global_batch_tokens": 9},
            "is 4 and global_batch_tokens is 9; give at most one",
        ),
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be an integer of at least 1"),
        ({"global_batch_size": True}, "global_batch_size is True"),
        ({"global_batch_tokens": 2.5}, "global_batch_tokens is 2.5"),
        ({"global_batch_size": 1, "seed": -1}, "seed is -1; it must be an integer of at least 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StepSampler(TOKENS, **arguments)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset is empty; training needs at least one sample"):
        StepSampler(np.zeros(0, dtype=np.int64), global_batch_size=1)
