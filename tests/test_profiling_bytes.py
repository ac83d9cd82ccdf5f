"""Counting bytes: the ledger against what autograd saves, and predicted against real peaks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from lightning_dcp.cost import CostModel
from lightning_dcp.models.layers import TransformerLayer, rotary
from lightning_dcp.plan import MicroBatch
from lightning_dcp.profiling import measure, static_bytes
from lightning_dcp.profiling.ledger import Ledger
from tests.profiling_tools import Model, lengths_of, load, survey_of


def test_ledger_agrees_with_saved_tensors() -> None:
    """Two sources: all live storages, and what autograd was given to save, once per storage."""
    torch.manual_seed(0)
    layer = TransformerLayer(24, 6)
    x = torch.randn(3, 40, 24, requires_grad=True)
    angles = rotary(torch.arange(40).expand(3, 40), 4)
    known = {t.untyped_storage()._cdata for t in (x, *angles, *layer.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        # Not the tensor itself: as the output of its own node it would never be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x, angles, None, True)
    saved[output.untyped_storage()._cdata] = output.untyped_storage().nbytes()
    del output
    with Ledger() as ledger:
        output = layer(x, angles, None, True)
        held = ledger.live
    assert held == sum(saved.values())
    del output
    assert ledger.live == 0


def test_ledger_sees_what_a_function_keeps_for_itself() -> None:
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.kept = x * 2  # type: ignore[attr-defined]
            return x + 1

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0] * ctx.kept  # type: ignore[attr-defined,no-any-return]

    with Ledger() as ledger:
        y = Keeping.apply(torch.ones(1000, requires_grad=True))  # type: ignore[no-untyped-call]
        # The input was made inside as well.
        assert ledger.live == 3 * 4000
    assert y.shape == (1000,)


def test_peak_counts_temporaries_and_leaves_gradients_out() -> None:
    with Ledger() as ledger:
        first = torch.ones(1000)
        gradient = torch.ones(500)
        del first
        torch.ones(600)
    assert ledger.live == 2000
    assert ledger.peak() == 6000
    assert ledger.peak(without=[gradient]) == 4000
    # Views and results in place are no new memory.
    with Ledger() as ledger:
        gradient.view(5, 100).t().add_(1)
    assert ledger.peak() == 0


def test_ledger_is_not_confused_by_reused_addresses() -> None:
    with Ledger() as ledger:
        for size in (100, 200, 300, 100) * 50:
            torch.ones(size)
        kept = torch.ones(7)
        assert ledger.live == 28
    assert kept.numel() == 7
    assert ledger.peak() == 1200


def test_dropped_forward_leaves_no_tensor() -> None:
    def count() -> int:
        gc.collect()
        return sum(1 for item in gc.get_objects() if type(item) is Tensor)

    module = Model()
    measure(survey_of(module), lengths_of(num_lengths=2), {})
    before = count()
    measure(survey_of(module), lengths_of(num_lengths=2), {})
    assert count() <= before


def real_peak(module: Model, batch_size: int, tokens: int, recompute: int) -> int:
    """Peak of a whole step above what was there before; gradients do not count."""
    survey = survey_of(module)
    micro_batch = MicroBatch(
        sample_ids=tuple(range(batch_size)), shapes=((tokens,),) * batch_size, padded_shape=(tokens,),
        first_rank=0, sp_size=1, recompute=(recompute,), nanoseconds=0, bytes=0,
    )  # fmt: skip
    module.__dict__["log"] = lambda *_: None
    with Ledger() as ledger, survey.subject.run(micro_batch, load(micro_batch)) as outcome:
        gradients = torch.autograd.grad(outcome.objective, list(module.parameters()))
    module.__dict__.pop("log")
    return ledger.peak(without=gradients)


@pytest.mark.parametrize("vocab_size", [64, 4000])
def test_predicted_bytes_of_a_whole_step(vocab_size: int) -> None:
    """Few probes of two layers tell the peak of six, at sizes between and beyond them, within 3 %."""
    module = Model(num_layers=6, vocab_size=vocab_size)
    profile = measure(survey_of(module, static_bytes=1000), lengths_of(), {})
    cost = CostModel(profile)
    for batch_size, tokens, recompute in [(1, 48, 0), (1, 40, 0), (4, 30, 0), (1, 96, 3), (3, 20, 5), (8, 48, 1)]:
        predicted = cost.bytes(batch_size, (tokens,), 1, (recompute,)) - 1000
        real = real_peak(module, batch_size, tokens, recompute)
        assert real <= 1.03 * predicted
        assert predicted <= 1.03 * real + 3 * 8 * batch_size * tokens
    # With every layer recomputed it is an upper bound: a whole layer comes on top of the largest temporary.
    predicted = cost.bytes(1, (48,), 1, (6,)) - 1000
    assert 0.97 * real_peak(module, 1, 48, 6) <= predicted <= 1.5 * real_peak(module, 1, 48, 6)


def test_recomputed_layer_holds_its_border_only() -> None:
    profile = measure(survey_of(Model()), lengths_of(num_lengths=2), {})
    for row in profile.measurements:
        border = row.batch_size * row.shape[0] * 24 * 4
        # The checkpoint keeps the state of the generator too.
        assert border <= row.input_bytes[0] <= border + 6000
        assert row.activation_bytes[0] > 10 * border


@pytest.mark.parametrize(
    ("dtype", "world_size", "per_parameter"),
    [(torch.float32, 2, 14 + 4), (torch.bfloat16, 2, 14), (torch.float32, 1, 24)],
)
def test_static_bytes(dtype: torch.dtype, world_size: int, per_parameter: int) -> None:
    module = nn.Linear(30, 20).to(dtype)
    assert static_bytes(module, world_size) == 620 * per_parameter
    module.bias.requires_grad_(False)
    module.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    assert static_bytes(module, world_size) == 600 * per_parameter + 20 * module.bias.element_size() + 24


def test_bytes_of_the_head_grow_with_the_vocabulary() -> None:
    """The loss over ``N x V`` logits adds about 2 N V at the peak; it is no part of the layers."""
    small = measure(survey_of(Model(vocab_size=64)), lengths_of(num_lengths=2), {}).measurements[-1]
    large = measure(survey_of(Model(vocab_size=6400)), lengths_of(num_lengths=2), {}).measurements[-1]
    tokens = 48 * large.batch_size
    assert small.activation_bytes == large.activation_bytes
    growth = large.constant_bytes - small.constant_bytes
    assert 2.5 * 4 * tokens * (6400 - 64) <= growth <= 4 * 4 * tokens * 6400
