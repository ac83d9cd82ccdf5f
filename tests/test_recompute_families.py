"""Which layers of a model are found to repeat."""

from __future__ import annotations

import copy
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp.models.presets import build
from lightning_dcp.recompute import RecomputeError, RecomputeSwitch, find_families


class Block(nn.Module):
    def __init__(self, width: int = 4, window: int | None = None, layer_idx: int = 0, drop: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.window = window
        self.layer_idx = layer_idx
        self.drop = drop
        self.label = f"block_{layer_idx}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(layers)})
        self.head = nn.Linear(4, 2)

    def blocks(self) -> list[nn.Module]:
        return list(self.inner["blocks"].children())


def sizes(module: nn.Module, **kwargs: object) -> list[tuple[str, int]]:
    return [(f.name, len(f.layers)) for f in find_families(module, **kwargs)]  # type: ignore[arg-type]


def test_index_names_and_growing_probabilities_do_not_split_a_family() -> None:
    model = Model(*(Block(layer_idx=i, drop=0.1 * (i + 1)) for i in range(4)))
    (family,) = find_families(model)
    assert family.name == "inner.blocks"
    assert list(family.layers) == model.blocks()


def test_one_list_with_two_families() -> None:
    """Sliding and full attention in one list have equal shapes; only a scalar attribute tells them apart."""
    model = Model(*(Block(window=None if i % 3 == 2 else 16, layer_idx=i) for i in range(6)))
    first, second = find_families(model)
    blocks = model.blocks()
    assert list(first.layers) == [blocks[i] for i in (0, 1, 3, 4)]
    assert list(second.layers) == [blocks[2], blocks[5]]
    assert first.name != second.name


@pytest.mark.parametrize("change", ["shape", "bias", "frozen", "dtype"])
def test_unlike_layer_stays_out(change: str) -> None:
    odd = Block(5 if change == "shape" else 4)
    if change == "bias":
        odd.linear = nn.Linear(4, 4, bias=False)
    elif change == "frozen":
        odd.requires_grad_(False)
    elif change == "dtype":
        odd.double()
    assert sizes(Model(odd, Block(), Block())) == [("inner.blocks[1]", 2)]


def test_lists_inside_a_chosen_layer_are_not_families() -> None:
    stages = [nn.Sequential(Block(), Block(), Block()) for _ in range(2)]
    assert sizes(Model(*stages)) == [("inner.blocks", 2)]
    # The outer list repeats nothing, so the inner one is found.
    assert sizes(nn.Sequential(nn.Embedding(9, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 9))) == [("1", 2)]


def test_models_of_the_paper() -> None:
    assert sizes(build("tiny-1d")) == [("layers", 3)]
    assert sizes(build("tiny-2d")) == [("spatial_layers", 2), ("temporal_layers", 2)]


def test_small_lists_teachers_and_averages_are_left_out() -> None:
    model = Model(*(Block(64) for _ in range(3)))
    model.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
    model.average = copy.deepcopy(model.inner).requires_grad_(False)
    assert sizes(model) == [("inner.blocks", 3)]
    # With nothing to train anywhere the frozen layers count: gradients may flow through them to an input.
    assert sizes(Model(Block(), Block()).requires_grad_(False)) == [("inner.blocks", 2)]


def test_model_without_repeated_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 2))
    assert find_families(model) == ()
    switch = RecomputeSwitch(())
    with switch.depth(()):
        assert switch.num_layers == ()


@pytest.mark.parametrize("names", [["Block"], [Block], ["inner.blocks"], ["inner.blocks.0", "inner.blocks.1"]])
def test_named_layers(names: list[str | type]) -> None:
    """Lightning-AI/pytorch-lightning#19267: layers chosen by class and by name."""
    model = Model(Block(), Block())
    (family,) = find_families(model, names)
    assert list(family.layers) == model.blocks()


def test_named_layer_that_does_not_repeat() -> None:
    model = Model(Block(), Block())
    (family,) = find_families(model, ["head"])
    assert family.layers == (model.head,)


def test_outermost_named_module_wins() -> None:
    outer = Block()
    outer.inner = Block()
    (family,) = find_families(Model(outer), [Block])
    assert family.layers == (outer,)


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(RecomputeError, match=r"'Blok' matches no module.*Block \(2x\).*'inner.blocks' \(2\)"):
        find_families(Model(Block(), Block()), ["Blok"])
    with pytest.raises(RecomputeError, match="empty"):
        find_families(Model(Block(), Block()), [])


def test_compiled_layers_are_found_by_their_own_class() -> None:
    model = Model(*(cast(nn.Module, torch.compile(Block(), backend="eager")) for _ in range(2)))
    for layers in (None, [Block], ["Block"]):
        (family,) = find_families(model, layers)
        assert list(family.layers) == model.blocks()


def test_reentrant_checkpointing_inside_a_layer_is_refused() -> None:
    model = Model(Block(), Block())
    layer = model.blocks()[1]
    vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
    RecomputeSwitch(find_families(model))
    vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=True)
    with pytest.raises(RecomputeError, match=r"layer 1 of 'inner.blocks'.*use_reentrant=False"):
        RecomputeSwitch(find_families(model))
