"""Skipping layers: whatever a layer takes and returns, the rest of the model runs on; nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_dcp.models.presets import build
from lightning_dcp.profiling.truncation import recorded, skipped
from lightning_dcp.recompute import find_families

WIDTH = 4


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[int] = []

    def work(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x + torch.tanh(self.linear(x))


class Plain(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


class Pair(NamedTuple):
    hidden: Tensor
    bias: Tensor


class Many(Counted):
    """Keyword arguments in, a tuple with a shared tensor, a new one and a number out."""

    def forward(self, x: Tensor, *, bias: Tensor, extra: dict[str, Any]) -> tuple[Pair, Tensor, int]:
        return Pair(self.work(x) + bias.mean() + extra["shift"], bias), x.mean(), 3


class ManyModel(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Many() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        bias, total = torch.ones(2, 7), x.new_zeros(())
        for layer in self.layers:
            (x, bias), mean, number = layer(x, bias=bias, extra={"shift": torch.ones(1)})
            assert number == 3
            assert bias.shape == (2, 7)
            total = total + mean
        return x.sum() + total


class Indexing(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.layers = nn.ModuleList(Plain() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            x = self.layers[i](x)
        return x.sum()


def sequential(count: int) -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Plain() for _ in range(count))), nn.Flatten())


def calls(model: nn.Module) -> list[int]:
    return [len(layer.calls) for layer in model.modules() if isinstance(layer, Counted)]


@pytest.mark.parametrize("make", [ManyModel, Indexing, sequential])
def test_two_layers_run_and_then_none(make: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(5), torch.randn(3, WIDTH, requires_grad=True)
    families = find_families(model)
    attributes = [set(vars(part)) for part in model.modules()]
    whole = model(x)
    counts = calls(model)
    with recorded(families) as recordings:
        model(x)
        assert calls(model) == [c + (i < 2) for i, c in enumerate(counts)]
    assert [r.count for r in recordings] == [1]
    with skipped(recordings):
        out = model(x)
        assert calls(model) == [c + (i < 2) for i, c in enumerate(counts)]
        assert torch.autograd.grad(out.sum(), [x])[0].abs().sum() > 0
    assert torch.equal(model(x), whole)
    assert [set(vars(part)) for part in model.modules()] == attributes


def test_truncated_model_computes_what_a_model_of_two_layers_does() -> None:
    for name, inputs in {
        "tiny-1d": (torch.arange(12).view(2, 6), torch.arange(6).expand(2, 6)),
        "tiny-2d": (torch.ones(2, 3, 4, 5),),
    }.items():
        long, short = build(name, num_layers=5), build(name, num_layers=2)
        short.load_state_dict({k: v for k, v in long.state_dict().items() if k in short.state_dict()})
        with recorded(find_families(long)) as recordings:
            assert torch.equal(long(*inputs), short(*inputs))
        assert all(r.call is not None and r.count == 1 for r in recordings)


def test_interleaved_families_in_one_list() -> None:
    class Wide(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.window = 3

    model = nn.Sequential(*(Wide() if i % 2 else Plain() for i in range(8)))
    families = find_families(model)
    assert [len(f.layers) for f in families] == [4, 4]
    with recorded(families):
        model(torch.ones(2, WIDTH))
    assert calls(model) == [1, 1, 1, 1, 0, 0, 0, 0]


def test_layers_in_reverse_order_still_run() -> None:
    """A layer that is called before the one it would learn from does its own work."""

    class Reversed(Indexing):
        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(list(self.layers)):
                x = layer(x)
            return x.sum()

    model, x = Reversed(4), torch.ones(2, WIDTH)
    whole = model(x)
    with recorded(find_families(model)) as recordings:
        assert torch.equal(model(x), whole)
    assert recordings[0].call is not None


def test_own_forward_of_a_layer_returns() -> None:
    model = Indexing(4)
    kept = [layer.forward for layer in model.layers]
    for layer, forward in zip(model.layers, kept, strict=True):
        layer.__dict__["forward"] = forward
    with recorded(find_families(model)) as recordings:
        model(torch.ones(1, WIDTH))
    with skipped(recordings):
        model(torch.ones(1, WIDTH))
    assert [vars(layer)["forward"] for layer in model.layers] == kept


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_layers(how: str) -> None:
    torch._dynamo.reset()
    model = Indexing(4)
    for i, layer in enumerate(model.layers):
        if how == "wrapped":
            model.layers[i] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
        else:
            layer.compile(backend="eager")
    x = torch.ones(2, WIDTH)
    whole = model(x)
    with recorded(find_families(model)) as recordings:
        two = model(x)
    with skipped(recordings):
        assert torch.equal(model(x), x.sum())
    assert not torch.equal(two, whole)
    assert torch.equal(model(x), whole)
    torch._dynamo.reset()
