"""The default collate: padding, positions, labels, and what stays whole."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dcp.data.collate import CollateRules, collate, detect_sequence_axes
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.sequence_parallel.context import SPGroup


def _micro_batch(*shapes: Shape, multiple: int = 1, packed: bool = False) -> MicroBatch:
    padded = [max(axis) for axis in zip(*shapes, strict=True)]
    padded[0] = -(-padded[0] // multiple) * multiple
    return MicroBatch(
        sample_ids=tuple(range(10, 10 + len(shapes))),
        shapes=shapes,
        padded_shape=tuple(padded) if not packed else (100,),
        packed=packed,
        first_rank=0,
        sp_size=multiple,
        nanoseconds=0,
        bytes=0,
    )


def _tokens(length: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + length)


def test_padding_positions_and_mask() -> None:
    batch = collate(
        [{"input_ids": _tokens(2)}, {"input_ids": _tokens(3)}],
        _micro_batch((2,), (3,), multiple=2),
        CollateRules(),
    )
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["position_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[True, True, False, False], [True, True, True, False]]
    assert batch["attention_mask"].dtype == torch.bool


def test_every_key_takes_the_same_route() -> None:
    """modelscope/ms-swift#10035: weights per token are padded like the tokens; per-sample values stay whole."""

    def sample(length: int, number: int) -> dict[str, Any]:
        return {
            "input_ids": _tokens(length),
            "labels": _tokens(length).to(torch.uint8),
            "weights": np.full(length, 0.5, dtype=np.float32),
            "features": torch.ones(length, 3),
            "segments": [number] * length,
            "image": torch.full((2, 2), float(number)),
            "number": number,
            "scale": 0.5,
            "flag": number > 1,
            "numpy_number": np.float64(number),
            "name": f"sample {number}",
            "nothing": None,
        }

    batch = collate(
        [sample(4, 1), sample(5, 2)], _micro_batch((4,), (5,)), CollateRules(pad_values={"weights": -1})
    )
    assert batch["labels"].tolist() == [[1, 2, 3, 4, -100], [1, 2, 3, 4, 5]]
    assert batch["labels"].dtype == torch.int64
    assert batch["weights"].tolist() == [[0.5] * 4 + [-1.0], [0.5] * 5]
    assert batch["weights"].dtype == torch.float32
    assert batch["features"].shape == (2, 5, 3)
    assert batch["features"][0].sum() == 12
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 0], [2] * 5]
    assert batch["image"].shape == (2, 2, 2)
    assert batch["number"].tolist() == [1, 2]
    assert batch["scale"].tolist() == [0.5, 0.5]
    assert batch["flag"].tolist() == [False, True]
    assert batch["numpy_number"].tolist() == [1.0, 2.0]
    assert batch["name"] == ["sample 1", "sample 2"]
    assert batch["nothing"] == [None, None]


def test_keys_of_the_sample_win() -> None:
    sample = {
        "input_ids": _tokens(2),
        "position_ids": torch.tensor([7, 8]),
        "attention_mask": torch.ones(2).long(),
    }
    batch = collate([sample, {**sample}], _micro_batch((2,), (2,), multiple=4), CollateRules())
    assert batch["position_ids"].tolist() == [[7, 8, 0, 0]] * 2
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]] * 2


def test_mixed_numbers_lose_nothing() -> None:
    samples = [{"x": _tokens(1), "n": 1}, {"x": torch.tensor([0.5]), "n": 1.5}]
    batch = collate(samples, _micro_batch((1,), (1,)), CollateRules())
    assert batch["x"].tolist() == [[1.0], [0.5]]
    assert batch["n"].tolist() == [1.0, 1.5]


def test_bare_tensors_are_tokens_and_read_only_arrays_do_not_warn() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collate([array, _tokens(2)], _micro_batch((3,), (2,)), CollateRules())
    assert batch["input_ids"].tolist() == [[0, 1, 2], [1, 2, 0]]


def test_samples_are_not_changed() -> None:
    sample = {"input_ids": _tokens(3), "labels": _tokens(3)}
    collate([sample], _micro_batch((3,)), CollateRules(shift_labels=True))
    assert sample["labels"].tolist() == [1, 2, 3]
    assert set(sample) == {"input_ids", "labels"}


def test_shifted_labels() -> None:
    samples = [
        {"input_ids": _tokens(2), "labels": _tokens(2, 5)},
        {"input_ids": _tokens(3), "labels": _tokens(3, 7)},
    ]
    batch = collate(samples, _micro_batch((2,), (3,)), CollateRules(shift_labels=True, ignore_index=-1))
    assert batch["labels"].tolist() == [[6, -1, -1], [8, 9, -1]]
    made = collate([_tokens(3).to(torch.uint8)], _micro_batch((3,)), CollateRules(shift_labels=True))
    assert made["labels"].tolist() == [[2, 3, -100]]
    with pytest.raises(ValueError, match='needs labels along the sequence under "labels"'):
        collate([{"x": _tokens(2), "labels": 1}], _micro_batch((2,)), CollateRules(shift_labels=True))


@pytest.mark.parametrize("sp_size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_no_pair_of_input_and_target_is_lost_at_a_boundary(sp_size: int, length: int) -> None:
    """huggingface/transformers#36607: labels are shifted on the whole sequence, then sharded."""
    module = DCPDataModule(1, shift_labels=True)
    samples = [_tokens(length), _tokens(8)]
    batch = module.collate(samples, _micro_batch((length,), (8,), multiple=sp_size))
    pairs: Counter[tuple[int, int]] = Counter()
    items = 0
    for rank in range(sp_size):
        shard = module.shard(batch, SPGroup(ranks=tuple(range(sp_size)), rank=rank))
        kept = shard["labels"] != -100
        pairs.update(zip(shard["input_ids"][kept].tolist(), shard["labels"][kept].tolist(), strict=True))
        items += module.loss_items(shard)
    expected = Counter((i, i + 1) for size in (length, 8) for i in range(1, size))
    assert pairs == expected
    assert items == sum(expected.values())


def test_extra_token_keys_are_sharded_and_sample_keys_are_not() -> None:
    """modelscope/ms-swift#10035, huggingface/trl#4579: per-token keys follow input_ids, user keys survive."""
    lengths = [4, 5, 8]
    dataset = [
        {"input_ids": _tokens(n), "weights": torch.arange(n) / 8, "vector": torch.arange(8), "name": "x", "n": n}
        for n in lengths
    ]
    module = DCPDataModule(2, lengths=lengths)
    module.train_dataset = dataset
    module.train_dataloader()
    batch = module.collate(dataset[1:], _micro_batch((5,), (8,)))
    for rank in range(2):
        shard = module.shard(batch, SPGroup(ranks=(0, 1), rank=rank))
        assert set(shard) == {*dataset[0], "position_ids", "attention_mask"}
        for key in ("input_ids", "weights", "position_ids", "attention_mask"):
            assert torch.equal(shard[key], batch[key][:, 4 * rank : 4 * rank + 4])
        # As long as the sequence here, but not in the shorter samples: no sequence.
        assert torch.equal(shard["vector"], batch["vector"])
        assert shard["vector"].shape == (2, 8)
        assert shard["n"].tolist() == [5, 8]
        assert shard["name"] == ["x", "x"]


def test_two_axes() -> None:
    def sample(frames: int, patches: int) -> dict[str, Any]:
        return {"video": torch.ones(frames, patches, 3), "times": torch.ones(frames), "size": torch.ones(2)}

    batch = collate([sample(3, 1), sample(1, 4)], _micro_batch((3, 1), (1, 4), multiple=4), CollateRules())
    assert batch["video"].shape == (2, 4, 4, 3)
    assert batch["video"].sum(dim=(1, 2, 3)).tolist() == [9, 12]
    assert batch["times"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["size"].shape == (2, 2)
    assert batch["attention_mask"].shape == (2, 4, 4)
    assert torch.equal(batch["attention_mask"], batch["video"][..., 0] == 1)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("dim", [2, -1])
def test_sequence_on_another_axis_or_nowhere(dim: int) -> None:
    """``sequence_dims`` names axes of the batch; ``None`` keeps a value whole although its size fits."""
    rules = CollateRules(sequence_dims={"rope": dim, "vector": None})
    samples = [
        {"input_ids": _tokens(3), "rope": torch.ones(2, 3), "vector": torch.ones(3)},
        {"input_ids": _tokens(3), "rope": torch.ones(2, 3), "vector": torch.ones(3)},
    ]
    batch = collate(samples, _micro_batch((3,), (3,), multiple=4), rules)
    assert batch["rope"].tolist() == [[[1, 1, 1, 0]] * 2] * 2
    assert batch["vector"].shape == (2, 3)
    module = DCPDataModule(1, sequence_dims={"rope": dim, "vector": None})
    shard = module.shard(batch, SPGroup(ranks=(0, 1), rank=1))
    assert shard["rope"].tolist() == [[[1, 0]] * 2] * 2
    assert shard["vector"].shape == (2, 3)
    with pytest.raises(ValueError, match=r"sample 10 was declared with shape \(3,\).*'rope': \(3, 2\)"):
        collate([{"input_ids": _tokens(3), "rope": torch.ones(3, 2)}], _micro_batch((3,)), rules)


def test_detection_of_sequences() -> None:
    dataset = [{"a": _tokens(n), "b": torch.ones(5), "c": torch.ones(n, 2), "d": 1} for n in (5, 3, 7)]
    shapes = np.asarray([[5], [3], [7]])
    assert detect_sequence_axes(dataset, shapes, CollateRules()) == {"a": 1, "b": 0, "c": 1}
    assert detect_sequence_axes(dataset[:1], shapes[:1], CollateRules()) == {}
    assert detect_sequence_axes([None, 1, {}], shapes, CollateRules()) == {}
    frames = [{"video": torch.ones(f, p, 4), "per_frame": torch.ones(f, 2)} for f, p in ((2, 2), (5, 2), (3, 6))]
    found = detect_sequence_axes(frames, np.asarray([[2, 2], [5, 2], [3, 6]]), CollateRules())
    assert found == {"video": 2, "per_frame": 1}


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (
            [_tokens(3), _tokens(4)],
            r"sample 11 was declared with shape \(5,\), but its data has \{'input_ids': \(4,\)",
        ),
        ([{"x": _tokens(3)}, {"y": _tokens(5)}], r"sample 11 has the keys \['y'\], sample 10 has \['x'\]"),
        (
            [{"x": _tokens(3), "v": torch.ones(2)}, {"x": _tokens(5), "v": torch.ones(3)}],
            r'"v" of sample 11 has the shape \(3,\), that of sample 10 \(2,\), and neither runs along',
        ),
        (
            [{"x": torch.ones(3, 2)}, {"x": torch.ones(5, 1)}],
            r'"x" of sample 11 has the shape \(5, 1\), that of sample 10 \(3, 2\)',
        ),
        ([(_tokens(3), 1), (_tokens(5), 1)], "a sample is of type tuple; samples must be dicts, or tensors"),
    ],
)
def test_samples_that_do_not_fit(samples: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        collate(samples, _micro_batch((3,), (5,)), CollateRules())


def test_one_wrong_key_is_found_where_the_sequences_are_known() -> None:
    rules = CollateRules(sequence_axes={"x": 1, "labels": 1})
    with pytest.raises(
        ValueError, match=r"sample 10 was declared with shape \(3,\), but its data has \{'labels': \(4,"
    ):
        collate([{"x": _tokens(3), "labels": _tokens(4)}], _micro_batch((3,)), rules)


def test_packed_micro_batches_need_an_own_collate() -> None:
    with pytest.raises(ValueError, match=r"the default collate pads; override collate\(samples, micro_batch\)"):
        collate([_tokens(3)], _micro_batch((3,), packed=True), CollateRules())
