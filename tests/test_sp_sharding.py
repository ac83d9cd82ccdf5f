"""Shards of a batch: every token on exactly one rank, every key of the user still there."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch

from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.sharding import shard_batch


def _group(rank: int, size: int) -> SPGroup:
    # Sharding exchanges nothing, so that no process group is needed.
    return SPGroup(ranks=tuple(range(size)), rank=rank)


def _shards(batch: dict[str, Any], size: int, length: int, **kwargs: Any) -> list[dict[str, Any]]:
    return [shard_batch(batch, _group(rank, size), sequence_length=length, **kwargs) for rank in range(size)]


class Pair(NamedTuple):
    tokens: torch.Tensor
    name: str


def _batch() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(16).view(2, 8),
        "labels": torch.arange(16).view(2, 8) + 1,
        "weights": torch.rand(2, 8, generator=torch.Generator().manual_seed(0)),
        "embeddings": torch.arange(96.0).view(2, 8, 6),
        "target": torch.tensor([3, 4]),
        "features": torch.rand(2, 5),
        "scale": torch.tensor(2.0),
        "names": ["a", "b"],
        "nested": {"ids": torch.arange(16).view(2, 8), "list": [torch.arange(16).view(2, 8), "x"]},
        "pair": Pair(torch.arange(16).view(2, 8), "kept"),
        "none": None,
        "count": 7,
    }


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_token_on_one_rank_and_every_key_survives(size: int) -> None:
    """Covers modelscope/ms-swift#10035 (per-token weights take the route of the labels; per-sample and scalar
    keys stay whole) and huggingface/trl#4579 (user keys survive).
    """
    whole = _batch()
    shards = _shards(whole, size, 8)
    for key in ("input_ids", "labels", "weights", "embeddings"):
        assert torch.equal(torch.cat([shard[key] for shard in shards], dim=1), whole[key])
    for shard in shards:
        assert shard.keys() == whole.keys()
        for key in ("target", "features", "scale", "none", "count"):
            assert shard[key] is whole[key]
        assert shard["names"] == whole["names"]
        assert isinstance(shard["pair"], Pair)
        assert shard["pair"].name == "kept"
        assert shard["nested"]["list"][1] == "x"
        assert shard["input_ids"].is_contiguous()
    for inner in (
        [shard["nested"]["ids"] for shard in shards],
        [shard["nested"]["list"][0] for shard in shards],
        [shard["pair"].tokens for shard in shards],
    ):
        assert torch.equal(torch.cat(inner, dim=1), whole["input_ids"])


@pytest.mark.parametrize("size", [2, 4])
def test_no_pair_of_input_and_target_is_lost(size: int) -> None:
    """Covers huggingface/transformers#36607: labels shifted on the whole keep the pair at each boundary."""
    tokens = torch.arange(1, 9)
    batch = {"input_ids": tokens[None], "labels": torch.cat([tokens[1:], torch.tensor([-100])])[None]}
    pairs = Counter(
        (int(x), int(y))
        for shard in _shards(batch, size, 8)
        for x, y in zip(shard["input_ids"][0], shard["labels"][0], strict=True)
    )
    assert pairs == Counter([(i, i + 1) for i in range(1, 8)] + [(8, -100)])


def test_named_axes_settle_what_cannot_be_guessed() -> None:
    batch: dict[str, Any] = {
        "features": torch.rand(2, 8),
        "mask": torch.arange(16).view(2, 1, 1, 8),
        "positions": torch.arange(8),
        "targets": {"level": torch.rand(2, 8), "tokens": torch.rand(2, 8)},
    }
    dims = {"features": None, "mask": -1, "positions": 0, "targets": None, "targets.tokens": 1}
    first, second = _shards(batch, 2, 8, sequence_dims=dims)
    assert first["features"] is batch["features"]
    assert torch.equal(second["mask"], batch["mask"][..., 4:])
    assert torch.equal(first["positions"], torch.arange(4))
    assert first["targets"]["level"].shape == (2, 8)
    assert first["targets"]["tokens"].shape == (2, 4)


def test_frames_of_two_dimensional_data() -> None:
    batch = {"latents": torch.arange(2 * 4 * 3 * 2).view(2, 4, 3, 2)}
    first, second = _shards(batch, 2, 4)
    assert torch.equal(torch.cat([first["latents"], second["latents"]], dim=1), batch["latents"])


def test_identity_for_one_rank() -> None:
    batch = _batch()
    assert shard_batch(batch, SPGroup(), sequence_length=7) is batch


@pytest.mark.parametrize(
    ("length", "dims", "message"),
    [
        (7, {}, "7 cannot be cut into 2 equal shards; pad to a multiple of 2"),
        (8, {"target": 1}, "axis 1 of 'target' is the sequence"),
        (8, {"features": 1}, r"its shape is \(2, 5\) and the padded length 8"),
        (8, {"input_ids": -3}, "axis -3 of 'input_ids'"),
    ],
)
def test_what_cannot_be_cut_is_named(length: int, dims: dict[str, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(_batch(), _group(0, 2), sequence_length=length, sequence_dims=dims)
