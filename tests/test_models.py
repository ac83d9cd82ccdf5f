"""The models: sizes of the paper's Table 1, and the properties that padding and sharding rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_dcp.models import (
    PRESETS,
    Transformer1D,
    Transformer1DConfig,
    Transformer2D,
    Transformer2DConfig,
    build,
)
from lightning_dcp.models.layers import SelfAttention, rotary, rotate


@pytest.mark.parametrize(
    ("name", "expected", "printed"),
    [
        ("transformer-1d", 5_065_641_984, 5e9),
        ("transformer-2d", 1_189_383_568, 1.2e9),
        ("bytes-1d", 493_248, 0.5e6),
    ],
)
def test_parameter_counts(name: str, expected: int, printed: float) -> None:
    with torch.device("meta"):
        model = build(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == expected
    assert abs(count / printed - 1) < 0.02


def test_presets_have_the_layers_width_and_heads_of_table_1() -> None:
    one, two = PRESETS["transformer-1d"], PRESETS["transformer-2d"]
    assert (one.num_layers, one.hidden_size, one.num_heads) == (42, 3072, 48)
    assert (two.num_layers, two.hidden_size, two.num_heads) == (28, 1152, 16)


def _one(**changes: Any) -> Transformer1D:
    torch.manual_seed(0)
    model = build("tiny-1d", **changes)
    assert isinstance(model, Transformer1D)
    for parameter in model.parameters():
        parameter.data = parameter.data.double() * 3  # random weights of scale 0.02 would hide differences
    return model


def _two() -> Transformer2D:
    torch.manual_seed(0)
    model = build("tiny-2d")
    assert isinstance(model, Transformer2D)
    for parameter in model.parameters():
        parameter.data = parameter.data.double() * 3
    return model


def _tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (batch, length), generator=generator)
    return tokens, torch.arange(length).expand(batch, length)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"positions": "learned"}])
def test_causal_output_does_not_depend_on_what_follows(changes: dict[str, Any]) -> None:
    model = _one(**changes)
    tokens, positions = _tokens(2, 9)
    whole = model(tokens, positions)
    assert torch.allclose(model(tokens[:, :5], positions[:, :5]), whole[:, :5], atol=1e-12)
    tokens[:, 5:] = 0
    assert torch.allclose(model(tokens, positions)[:, :5], whole[:, :5], atol=1e-12)


def test_full_attention_needs_the_mask_to_ignore_padding() -> None:
    model = _one(causal=False)
    tokens, positions = _tokens(2, 9)
    mask = torch.arange(9).expand(2, 9) < 6
    short = model(tokens[:, :6], positions[:, :6])
    assert torch.allclose(model(tokens, positions, mask)[:, :6], short, atol=1e-12)
    assert not torch.allclose(model(tokens, positions)[:, :6], short, atol=1e-6)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_positions_come_from_the_position_ids(positions: Any) -> None:
    """What rank 1 of a sequence-parallel group needs: a shard is not at the start of its sequence."""
    model = _one(positions=positions)
    tokens, place = _tokens(1, 6)
    moved = torch.cat([place[:, :3], place[:, 3:] + 2], dim=1)
    assert not torch.allclose(model(tokens, place), model(tokens, moved), atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 4, 2, 8, generator=generator).double()
    place = torch.arange(4)[None]

    def scores(shift: int) -> torch.Tensor:
        angles = rotary(place + shift, 8)
        return torch.einsum("bshd,bthd->bhst", rotate(query, angles), rotate(key, angles))

    assert torch.allclose(scores(0), scores(37), atol=1e-4)
    assert not torch.allclose(scores(0), torch.einsum("bshd,bthd->bhst", query, key), atol=1e-2)


def test_attention_is_looked_up_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy replaces this one function; a name bound at import would escape it without an error."""
    calls: list[bool] = []
    original = F.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(bool(kwargs["is_causal"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    _one()(*_tokens(1, 4))
    assert calls == [True] * 3
    _two()(torch.randn(1, 2, 3, 5).double())
    assert calls[3:] == [False] * 4


def test_two_axes_are_mixed_and_padding_is_not() -> None:
    model = _two()
    generator = torch.Generator().manual_seed(2)
    small = torch.randn(2, 3, 4, 5, generator=generator).double()
    padded = torch.full((2, 5, 6, 5), 1e4).double()
    padded[:, :3, :4] = small
    mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[:, :3, :4] = True
    expected = model(small)
    assert expected.shape == small.shape
    assert torch.allclose(model(padded, mask)[:, :3, :4], expected, atol=1e-9)
    assert torch.isfinite(model(padded, mask)).all()
    for index in [(0, 2, 3), (0, 0, 3), (0, 2, 0)]:
        changed = small.clone()
        changed[index] += 1.0
        assert not torch.allclose(model(changed)[0, 0, 0], expected[0, 0, 0], atol=1e-9)
        assert torch.equal(model(changed)[1], expected[1])


def test_two_families_alternate() -> None:
    model = _two()
    order: list[str] = []
    for name, family in (("spatial", model.spatial_layers), ("temporal", model.temporal_layers)):
        for layer in family:
            layer.register_forward_hook(lambda *_, name=name: order.append(name))
    model(torch.randn(1, 2, 3, 5).double())
    assert order == ["spatial", "temporal"] * 2


def test_dropout_is_off_in_evaluation() -> None:
    model = _one(dropout=0.5)
    inputs = _tokens(1, 5)
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def test_refusals_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"no preset is named 'gpt'; allowed are bytes-1d"):
        build("gpt")
    with pytest.raises(ValueError, match="must divide"):
        build("tiny-1d", num_kv_heads=4)
    with pytest.raises(ValueError, match="must divide"):
        SelfAttention(10, 3)
    with pytest.raises(ValueError, match="in pairs"):
        Transformer1DConfig(vocab_size=4, num_layers=1, hidden_size=9, num_heads=3)
    with pytest.raises(ValueError, match="at least 1"):
        Transformer1DConfig(vocab_size=4, num_layers=0, hidden_size=8, num_heads=2)
    with pytest.raises(ValueError, match="'rotary' and 'learned'"):
        build("tiny-1d", positions="alibi")
    with pytest.raises(ValueError, match=r"dropout in \[0, 1\)"):
        build("tiny-2d", dropout=1.0)
    with pytest.raises(ValueError, match="in pairs"):
        Transformer2DConfig(in_size=1, out_size=1, num_layers=1, hidden_size=9, num_heads=3)
