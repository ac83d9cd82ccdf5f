"""Operations of a sample, counted on the model and by hand: equal to the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.metrics import FlopCount, fitted
from lightning_dcp.metrics.flops import AttentionCall, Observation
from lightning_dcp.models import Transformer1D, Transformer1DConfig, Transformer2D, Transformer2DConfig
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.profiling import count_flops
from lightning_dcp.recompute import RecomputeSwitch
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from tests.fitting import HEADS, LAYERS, VOCABULARY, Case, Module
from tests.profiling_tools import Hooks

Batch = dict[str, Any]
LENGTHS: tuple[Shape, ...] = ((1,), (3,), (8,), (11,))
BOXES: tuple[Shape, ...] = ((1, 4), (3, 2), (4, 4), (5, 3))


class Stepped(pl.LightningModule):
    """Trains any model whose output is summed up; its buffer, counter and random numbers must not move."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model, self.call, self.steps = model, call, 0
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen += torch.rand(1)
        return self.call(self.model, batch).sum()


class Whole(Hooks):
    """Batches of one rank."""

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        return batch


def _count(
    module: pl.LightningModule, load: Callable[[MicroBatch], Batch], shapes: Sequence[Shape]
) -> FlopCount | None:
    runner = MicroBatchRunner(
        module=module, groups=ProcessGroups([(0, 1)]), recompute=RecomputeSwitch(()), hooks=Whole(), seed=0
    )
    return count_flops(runner, 0, 1, list(enumerate(shapes)), load)


def _text(micro_batch: MicroBatch) -> Batch:
    (length,) = micro_batch.padded_shape
    ids = torch.arange(length)[None] % VOCABULARY
    positions = torch.arange(length)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "kind": torch.tensor([length % 2])}


def _image(micro_batch: MicroBatch) -> Batch:
    generator = torch.Generator().manual_seed(1)
    box = torch.randn(1, *micro_batch.padded_shape, 5, generator=generator)
    return {"x": box, "labels": box, "mask": torch.ones(box.shape[:-1], dtype=torch.bool)}


def _forward(module: pl.LightningModule, load: Callable[[MicroBatch], Batch], known: Sequence[Shape]) -> Any:
    count = _count(module, load, known)
    assert count is not None
    assert count.exact
    return lambda *shapes: count.forward(np.asarray(shapes, dtype=np.int64)).tolist()


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("causal", "kv_heads"), [(True, 2), (False, 6)])
def test_transformer_1d(causal: bool, kv_heads: int, mask: bool) -> None:
    c, layers, vocabulary = 24, 3, 64
    config = Transformer1DConfig(
        vocab_size=vocabulary, num_layers=layers, hidden_size=c, num_heads=6, num_kv_heads=kv_heads, causal=causal
    )

    def call(model: nn.Module, batch: Batch) -> Tensor:
        everything = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask else None
        logits: Tensor = model(batch["input_ids"], batch["position_ids"], everything)
        return logits

    torch.manual_seed(0)
    module = Stepped(Transformer1D(config), call)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    forward = _forward(module, _text, LENGTHS)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())

    matrices = 2 * c * c + 2 * c * (kv_heads * c // 6) + 8 * c * c

    def by_hand(s: int) -> int:
        pairs = s * (s + 1) // 2 if causal else s * s
        return 2 * s * (layers * matrices + c * vocabulary) + layers * pairs * 4 * c

    assert forward((1,), (7,), (4096,)) == [by_hand(1), by_hand(7), by_hand(4096)]


def test_transformer_2d() -> None:
    c, rounds, size = 24, 2, 5
    config = Transformer2DConfig(in_size=size, out_size=size, num_layers=rounds, hidden_size=c, num_heads=6)
    module = Stepped(Transformer2D(config), lambda model, batch: model(batch["x"], batch["mask"]))
    forward = _forward(module, _image, BOXES)
    matrices = 2 * rounds * (4 * c * c + 3 * 4 * c * c) + 2 * c * size

    def by_hand(f: int, p: int) -> int:
        return 2 * f * p * matrices + rounds * 4 * c * (f * p * p + p * f * f)

    assert forward((1, 1), (6, 6), (7, 100)) == [by_hand(1, 1), by_hand(6, 6), by_hand(7, 100)]


def by_hand_net(s: int, width: int = 16, kv_heads: int = 2) -> int:
    """Forward of ``tests.fitting.Net`` on one sample."""
    matrices = 2 * width * width + width * 2 * kv_heads * width // HEADS + 4 * width * width
    return 2 * s * (LAYERS * matrices + width * VOCABULARY) + LAYERS * 4 * width * s * (s + 1) // 2


def test_net_with_two_heads() -> None:
    forward = _forward(Module(Case(masked="none")), _text, LENGTHS)
    assert forward((2,), (33,)) == [by_hand_net(2), by_hand_net(33)]


class OwnAttention(nn.Module):
    """One layer of attention in the ways in which models write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8, bias=False)
        self.mha = nn.MultiheadAttention(8, 2, bias=False, batch_first=True) if way == "module" else None

    def forward(self, ids: Tensor) -> Tensor:
        x_BSC = self.out(self.embedding(ids))
        s = ids.shape[1]
        lower = torch.ones(s, s, dtype=torch.bool).tril()
        if self.mha is not None:
            y: Tensor = self.mha(x_BSC, x_BSC, x_BSC, attn_mask=~lower, need_weights=False)[0]
            return y
        heads = x_BSC.unflatten(-1, (2, 4)).transpose(1, 2)
        if self.way == "written out":
            mixed: Tensor = torch.softmax(heads @ heads.transpose(2, 3), -1) @ heads
            return mixed
        bias = torch.zeros(s, s).masked_fill(~lower, torch.finfo(torch.float32).min)
        mask = {"bool": lower, "float": bias[None, None], "window": lower & ~lower.tril(-2)}[self.way]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


@pytest.mark.parametrize(
    ("way", "pairs", "matrices"),
    [
        ("bool", "causal", 1),
        ("float", "causal", 1),
        ("module", "causal", 5),
        ("window", "full", 1),
        ("written out", "full", 1),
    ],
)
def test_masks_are_looked_at_once(way: str, pairs: str, matrices: int) -> None:
    """A causal mask halves the pairs however it is given; every other mask counts as none."""
    module = Stepped(OwnAttention(way), lambda model, batch: model(batch["input_ids"]))
    (flops,) = _forward(module, _text, LENGTHS)((50,))
    assert flops == 2 * 50 * 64 * matrices + 32 * (50 * 51 // 2 if pairs == "causal" else 2500)


def test_what_cannot_be_counted_says_so() -> None:
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise OSError("disk on fire")

    with pytest.warns(
        UserWarning, match="could not be counted, so neither MFU nor FLOP/s are logged.*disk on fire"
    ):
        assert _count(Stepped(nn.Linear(1, 1), broken), _text, LENGTHS) is None

    def halved(model: nn.Module, batch: Batch) -> Tensor:
        x = model(batch["input_ids"].float()[0, : len(batch["input_ids"][0]) // 2 + 1, None])
        return F.scaled_dot_product_attention(x, x, x)

    with pytest.warns(UserWarning, match=r"attention over \[1, 2, 5, 6\] in samples of shapes"):
        assert _count(Stepped(nn.Linear(1, 1), halved), _text, LENGTHS) is None

    def labelled(model: nn.Module, batch: Batch) -> Tensor:
        y: Tensor = model(torch.ones(round(batch["input_ids"].shape[1] ** 0.5), 1))
        return y

    with pytest.warns(UserWarning, match="do not follow from the number of tokens alone"):
        count = _count(Stepped(nn.Linear(1, 1), labelled), _text, LENGTHS)
    assert count is not None
    assert count.training(np.asarray([[23], [23]])) == pytest.approx(3 * 2 * 2 * (1 + 2 + 3 + 3))


def _seen(shape: Shape, **changes: int) -> Observation:
    call = {"sequences": 1, "queries": shape[0], "keys": shape[0], "pairs": shape[0] ** 2, "flops_per_pair": 8}
    return Observation(shape=shape, dense=10 * shape[0], calls=(AttentionCall(**{**call, **changes}),))


def test_lengths_of_attention_follow_from_the_sample() -> None:
    """A class token, a fixed memory, heads folded into the batch, one known length."""

    def flops(s: int, *seen: Observation) -> float:
        return float(fitted(seen).forward(np.asarray([[s]]))[0])

    one_more = [_seen((s,), queries=s + 1, keys=s + 1, pairs=(s + 1) ** 2) for s in (3, 5)]
    assert flops(9, *one_more) == 90 + 800
    memory = [_seen((s,), keys=77, pairs=77 * s) for s in (3, 5)]
    assert flops(9, *memory) == 90 + 8 * 9 * 77
    folded = [_seen((s,), sequences=4) for s in (3, 5)]
    assert flops(9, *folded) == 90 + 4 * 8 * 81
    assert flops(9, _seen((4,))) == 90 + 8 * 81
    with pytest.raises(ValueError, match="number of attention calls differs"):
        fitted([_seen((3,)), Observation(shape=(4,), dense=40, calls=())])


def test_samples_of_equal_size_and_unequal_operations_are_not_met_exactly() -> None:
    """Two boxes of 12 tokens: neither may be left out because the other has as many."""
    seen = [
        Observation(shape=shape, dense=dense, calls=())
        for shape, dense in (((2, 6), 100), ((3, 4), 240), ((2, 2), 80))
    ]
    count = fitted(seen)
    assert not count.exact
    assert count.dense == (0.0, 420 / 28, 0.0)
