"""The sampler while planners draw: position and what lies beyond it, whoever resumes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import IntArray
from lightning_dcp.data.drawing import Stray
from lightning_dcp.data.sampler import StepSampler

TOKENS = np.random.default_rng(0).integers(1, 30, size=41)


def sampler(state: Any = None, drawing: bool = True, **arguments: Any) -> StepSampler:
    """A sampler behind a saved state that went through JSON."""
    made = StepSampler(TOKENS, seed=3, **arguments)
    made.drawing = drawing
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    return made


def every(offered: IntArray, stride: int = 2, most: int = 5) -> IntArray:
    """A pure rule of what to draw: every second of the offered samples, a few of them."""
    return offered[::stride][:most]


def drawn(made: StepSampler, lookahead: int = 12, stride: int = 2, mark: bool = True) -> Iterator[list[int]]:
    """The steps of what is left of the epoch; each is marked as soon as the next one is asked for."""
    epoch, step = made.begin()
    draw = made.draw()
    while draw.left:
        ids = every(draw.offer(lookahead), stride)
        draw.take(ids)
        yield ids.tolist()
        if mark:
            made.mark_consumed(epoch, step, ids)
        step += 1


def fixed(made: StepSampler, count: int) -> list[list[int]]:
    epoch, first = made.begin()
    steps = range(first, first + count)
    found = [made.samples(epoch, step).tolist() for step in steps]
    for step in steps:
        made.mark_consumed(epoch, step)
    return found


def flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


def states(epochs: int = 2) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """For every step of a run: the state behind it, and the steps that follow it in the epoch."""
    made, found = sampler(), []
    for _ in range(epochs):
        done: list[list[int]] = []
        rows = []
        for ids in drawn(made):
            rows.append((made.state_dict(), len(done)))
            done.append(ids)
        rows.append((made.state_dict(), len(done)))
        found += [(state, done[count:]) for state, count in rows]
    return found


def test_each_sample_once_per_epoch_and_not_in_order() -> None:
    made = sampler()
    for epoch in range(3):
        steps = list(drawn(made))
        order = StepSampler(TOKENS, seed=3, global_batch_size=len(TOKENS)).samples(epoch, 0).tolist()
        assert made.epoch == epoch
        assert sorted(flat(steps)) == list(range(len(TOKENS)))
        assert flat(steps) != order
        assert steps[0] == order[:9:2]
    assert made.consumed_samples == 3 * len(TOKENS)
    assert made.consumed_tokens == 3 * int(TOKENS.sum())


def test_resuming_after_any_step_makes_the_same_steps() -> None:
    for state, rest in states():
        resumed = sampler(state)
        if rest:
            assert list(drawn(resumed)) == rest
        else:
            # Behind the last step comes the next epoch, in full.
            assert sorted(flat(list(drawn(resumed)))) == list(range(len(TOKENS)))
            assert resumed.epoch == state["epoch"] + 1


def test_what_was_drawn_ahead_is_not_consumed() -> None:
    """lhotse-speech/lhotse#417."""
    made = sampler()
    for _, _ in zip(drawn(made), range(3), strict=False):
        pass
    before = made.state_dict()
    assert len(list(drawn(made, mark=False))) > 3
    assert made.state_dict() == before


@pytest.mark.parametrize(("lookahead", "stride"), [(3, 1), (41, 3), (1, 2)])
def test_another_planner_trains_the_rest_once(lookahead: int, stride: int) -> None:
    """Another number of ranks changes the lookahead too."""
    for state, rest in states(1):
        resumed = sampler(state)
        found = list(drawn(resumed, lookahead, stride))
        assert sorted(flat(found)) == (sorted(flat(rest)) or list(range(len(TOKENS))))


@pytest.mark.parametrize("size", [{"global_batch_size": 4}, {"global_batch_tokens": 60}])
def test_fixed_steps_after_drawn_ones_are_cut_from_what_is_left(size: dict[str, Any]) -> None:
    for state, rest in states(1):
        if not rest:
            continue
        with pytest.warns(UserWarning, match="were drawn by the planner, those of this run are fixed by global_b"):
            resumed = sampler(state, False, **size)
        epoch, first = resumed.begin()
        assert first == state["step"]
        count = resumed.num_steps(epoch) - first
        order = [i for i in StepSampler(TOKENS, seed=3, global_batch_size=99).samples(0, 0) if i in flat(rest)]
        steps = fixed(resumed, count)
        assert flat(steps) == order, "in the order of the epoch"
        if "global_batch_size" in size:
            assert [len(step) for step in steps[:-1]] == [4] * (count - 1)
        else:
            assert all(int(TOKENS[step].sum()) <= 60 for step in steps)
        # The next epoch is as if nothing had been drawn.
        assert fixed(resumed, 1)[0] == sampler(None, False, **size).samples(1, 0).tolist()


@pytest.mark.parametrize("size", [{"global_batch_size": 4}, {"global_batch_tokens": 60}])
def test_fixed_steps_of_a_partly_drawn_epoch_resume_exactly(size: dict[str, Any]) -> None:
    made = sampler()
    for _, _ in zip(drawn(made), range(4), strict=False):
        pass
    with pytest.warns(UserWarning, match="drawn by the planner"):
        changed = sampler(made.state_dict(), False, **size)
    steps: list[list[int]] = []
    kept = [changed.state_dict()]
    while changed.position < len(TOKENS):
        steps += fixed(changed, 1)
        kept.append(changed.state_dict())
    for done, state in enumerate(kept[1:-1], start=1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed = sampler(state, False, **size)
        assert fixed(resumed, len(steps) - done) == steps[done:]
        with pytest.warns(
            UserWarning, match=r"fixed by global_batch_\w+ = \d+, those of this run are drawn by the pl"
        ):
            drawing = sampler(state)
        assert sorted(flat(list(drawn(drawing)))) == sorted(flat(steps[done:]))


def test_drawing_goes_on_where_fixed_steps_stopped() -> None:
    made = sampler(drawing=False, global_batch_size=4)
    done = fixed(made, 3)
    with pytest.warns(UserWarning, match=r"were fixed by global_batch_size = 4, those of this run are drawn"):
        resumed = sampler(made.state_dict(), global_batch_size=7)
    assert resumed.begin() == (0, 3)
    rest = flat(list(drawn(resumed)))
    assert sorted(rest + flat(done)) == list(range(len(TOKENS)))


def test_a_size_that_does_not_decide_the_steps_does_not_block_a_state() -> None:
    made = sampler(global_batch_size=4)
    for _, _ in zip(drawn(made), range(3), strict=False):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes: tuple[dict[str, Any], ...] = ({"global_batch_size": 5}, {"global_batch_tokens": 9}, {})
        for size in sizes:
            assert sampler(made.state_dict(), **size).state_dict() == made.state_dict()


def test_other_data_is_still_refused() -> None:
    state = sampler().state_dict()
    other = StepSampler(TOKENS, seed=4)
    with pytest.raises(ValueError, match="seed = 3, this run has 4"):
        other.load_state_dict(state)
    assert "beyond" in state
    assert state["global_batch_size"] is state["global_batch_tokens"] is None


def test_a_state_from_before_drawing_is_read() -> None:
    made = sampler(drawing=False, global_batch_size=4)
    fixed(made, 2)
    state = {name: value for name, value in made.state_dict().items() if name not in ("step", "drawn")}
    assert sampler(state, False, global_batch_size=4).begin() == (0, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"beyond": [3, 2]}, r"position is \d+ with \[3, 2\] beyond it"),
        ({"beyond": [99]}, r"position is \d+ with \[99\] beyond it"),
        ({"beyond": [0]}, r"position is \d+ with \[0\] beyond it"),
        ({"beyond": "7"}, "beyond is '7' and drawn is True; they must be a list and a bool"),
        ({"beyond": [1.5]}, "beyond is 1.5; it must be an integer"),
        ({"drawn": 1}, "drawn is 1; they must be"),
        ({"drawn": False}, "where no step of epoch 0 starts"),
        ({"position": 42}, "position is 42 with"),
        ({"step": -1}, "step is -1; it must be an integer of at least 0"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], sentence: str) -> None:
    made = sampler()
    next(steps := drawn(made))
    next(steps)
    before = made.state_dict()
    assert before["beyond"]
    with pytest.raises(ValueError, match=sentence):
        made.load_state_dict({**before, **change})
    assert made.state_dict() == before


def test_no_length_while_a_planner_draws() -> None:
    made = sampler(global_batch_size=4)
    for ask in (len, lambda s: s.num_steps(0)):
        with pytest.raises(TypeError, match=r"the planner draws the samples of each step.*Trainer\(max_steps="):
            ask(made)
    made.drawing = False
    assert len(made) == 11
    with pytest.raises(ValueError, match="neither global_batch_size nor global_batch_tokens is given"):
        sampler(drawing=False)


def test_steps_drawn_before_the_mode_changed_are_out_of_date() -> None:
    made = StepSampler(TOKENS, global_batch_size=4)
    before = made.version
    made.drawing = False
    assert made.version == before
    made.drawing = True
    assert made.version > before


def test_a_drawn_step_is_consumed_once() -> None:
    made = sampler()
    steps = drawn(made)
    first = np.asarray(next(steps))
    next(steps)
    before = made.state_dict()
    for epoch, step, ids in ((0, 0, first), (0, 1, first), (1, 1, np.asarray([1])), (0, 1, np.asarray([999]))):
        with pytest.raises(
            RuntimeError, match=f"step {step} of epoch {epoch} was marked as consumed, but 5 of 41"
        ):
            made.mark_consumed(epoch, step, ids)
    assert made.state_dict() == before
    counts = made.counts()
    assert made.position < 5, "nothing was drawn beyond the position, so places and samples are the same"
    assert (counts.planned, counts.trained, counts.left) == (41, 5, 36)


def test_stray_by_hand() -> None:
    made = StepSampler(TOKENS[:8], shuffle=False)
    made.mark_consumed(0, 0, np.asarray([4, 0]))  # trained as 0th and 1st: 0 and 3 places away
    assert made.stray == Stray(1.5, 3)
    made.mark_consumed(0, 1, np.asarray([1, 2, 7]))  # 2nd, 3rd, 4th: 1, 1 and 3 places away
    assert made.stray == Stray(5 / 3, 3)
    made.mark_consumed(0, 2, np.asarray([3, 5, 6]))  # 5th, 6th, 7th: 2, 1 and 1
    assert made.stray == Stray(4 / 3, 2)


def test_fixed_steps_do_not_stray() -> None:
    made = StepSampler(TOKENS, global_batch_size=4)
    for step in range(len(made)):
        made.mark_consumed(0, step)
        assert made.stray == Stray(0.0, 0)


def test_steps_may_be_drawn_and_fixed_in_turn() -> None:
    made = sampler(global_batch_size=4)
    trained: list[int] = []
    for turn in range(4):
        made.drawing = turn % 2 == 0
        if made.drawing:
            epoch, step = made.begin()
            ids = every(made.draw().offer(12))
            made.mark_consumed(epoch, step, ids)
            trained += ids.tolist()
        else:
            trained += flat(fixed(made, 1))
    trained += flat(fixed(made, made.num_steps(0) - made.begin()[1]))
    assert sorted(trained) == list(range(len(TOKENS)))
