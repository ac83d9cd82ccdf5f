"""Laying two recordings over each other: which parts must be equal, and which of several differences is the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dcp.selfcheck.overlay import Difference, first_in_padding, first_in_repetition, first_in_shards
from lightning_dcp.selfcheck.recording import Event, Recording
from lightning_dcp.selfcheck.samples import Row, Samples, choose

PAIR = Row(sample_ids=(4, 2), shapes=((5,), (8,)), padded_shape=(8,))


def _recording(*rows: dict[str, Tensor]) -> Recording:
    """Outputs by module name, one dict for each micro-batch."""
    recording = Recording(classes={name: "Part" for row in rows for name in row})
    for row in rows:
        events = {Event(module=name, call=0, side="output", index=0): tensor for name, tensor in row.items()}
        recording.rows.append(events)
    return recording


def _in_shards(whole: Tensor, shard: Tensor, rank: int = 1) -> Difference | None:
    return first_in_shards(_recording({"a": whole}), _recording({"a": shard}), (PAIR,), 2, rank, 1e-5)


def _whole(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 8, 3), 1), ((2, 6, 8, 3), 2), ((8, 3), 0), ((1, 1, 8), 2), ((8, 2, 3), 0)]
)
def test_a_shard_is_a_contiguous_part_along_the_sequence(shape: tuple[int, ...], axis: int) -> None:
    whole = _whole(*shape)
    first, second = whole.chunk(2, axis)
    assert _in_shards(whole, second) is None
    assert _in_shards(whole, first, rank=0) is None
    found = _in_shards(whole, first)
    assert found is not None
    assert "the output of 'a' (Part)" in found.text


def test_padding_of_a_shard_may_differ_and_real_tokens_may_not() -> None:
    whole = _whole(2, 8, 3)
    shard = whole[:, 4:].clone()
    shard[0, 1:] = 7.0  # sample 4 ends at token 5
    assert _in_shards(whole, shard) is None
    shard[0, 0] += 1e-3
    assert _in_shards(whole, shard) is not None


def test_batch_and_sequence_in_one_axis() -> None:
    whole = _whole(2, 8, 3)
    assert _in_shards(whole.flatten(0, 1), whole[:, 4:].flatten(0, 1)) is None
    assert _in_shards(whole.flatten(0, 1), whole[:, :4].flatten(0, 1)) is not None


def test_what_is_whole_on_every_rank_is_compared_whole() -> None:
    whole = _whole(2, 3)
    assert _in_shards(whole, whole) is None
    assert _in_shards(whole, whole + 1) is not None


def test_an_unclear_shape_is_named_only_where_nothing_else_is() -> None:
    mask, hidden = _whole(8, 8), _whole(2, 8, 3)
    whole, shards = {"mask": mask, "layer": hidden}, {"mask": mask[:4, :4], "layer": hidden[:, 4:]}
    found = first_in_shards(_recording(whole), _recording(shards), (PAIR,), 2, 1, 1e-5)
    assert found is not None
    assert "(4, 4) for a shard, (8, 8) for the whole" in found.text
    shards["layer"] = hidden[:, :4]
    surer = first_in_shards(_recording(whole), _recording(shards), (PAIR,), 2, 1, 1e-5)
    assert surer is not None
    assert "'layer'" in surer.text
    assert surer.order < found.order


def test_no_number_differs_and_minus_infinity_of_a_mask_does_not() -> None:
    whole = _whole(2, 8)
    whole[1, 6] = float("-inf")
    assert _in_shards(whole, whole[:, 4:]) is None
    shard = whole[:, 4:].clone()
    shard[1, 0] = float("nan")
    assert _in_shards(whole, shard) is not None


def test_padding_is_compared_sample_by_sample() -> None:
    samples = Samples.of((4, 2), ((5,), (8,)), (1, 2))
    short, long = _whole(1, 5, 3), _whole(1, 8, 3)
    together = torch.full((2, 8, 3), 9.0)
    together[0, :5], together[1] = short[0], long[0]
    alone = _recording({"a": short}, {"a": long})
    assert first_in_padding(alone, _recording({"a": together}), samples.singles, samples.pair, 1e-5) is None
    together[0, 4, 0] += 1e-2
    found = first_in_padding(alone, _recording({"a": together}), samples.singles, samples.pair, 1e-5)
    assert found is not None
    assert "at real tokens of sample 4" in found.text
    flat = _recording({"a": short[0]}, {"a": long[0]})
    flat_pair = _recording({"a": together.flatten(0, 1)})
    assert first_in_padding(flat, flat_pair, samples.singles, samples.pair, 1e-5) is not None
    assert first_in_padding(flat, flat_pair, samples.singles, samples.pair, 1e-1) is None


def test_a_repetition_is_compared_in_order_of_time() -> None:
    once = _recording({"a": _whole(2, 3), "b": _whole(3, 3), "c": _whole(4)})
    again = _recording({"a": _whole(2, 3), "b": _whole(3, 3) + 1, "c": _whole(4) + 1})
    found = first_in_repetition(once, again, 1e-5)
    assert found is not None
    assert found.order == (0, 0, 1)
    assert first_in_repetition(once, once, 1e-5) is None


def test_samples_are_padded_to_a_multiple_of_every_size() -> None:
    samples = Samples.of((9, 3), ((13, 4), (5, 6)), (1, 2, 3))
    assert samples.pair == Row(sample_ids=(3, 9), shapes=((5, 6), (13, 4)), padded_shape=(18, 6))
    assert [row.padded_shape for row in samples.singles] == [(5, 6), (13, 4)]
    assert [row.padded_shape for row in samples.padded_singles] == [(18, 6), (18, 6)]
    assert Samples.of((9, 9), ((5,), (5,)), (1,)).pair.sample_ids == (9,)


@pytest.mark.parametrize(
    ("shapes", "items", "expected"),
    [
        (((3,), (4,)), (1.0, 1.0), (0, 1)),
        (((3,), (3,), (4,)), (1.0, 1.0, 1.0), (0, 2)),
        (((3,), (4,), (5,)), (0.0, 2.0, 3.0), (1, 2)),
        (((3,), (4,), (4,)), (0.0, 2.0, 3.0), (1, 2)),
        (((3,), (4,)), (0.0, 0.0), (0, 1)),
        (((3,),), (1.0,), (0,)),
    ],
)
def test_samples_with_items_and_different_shapes_are_preferred(
    shapes: tuple[tuple[int, ...], ...], items: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert choose(shapes, items) == expected
