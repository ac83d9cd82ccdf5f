"""Recomputing changes memory, never a number: gradients are compared bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dcp.models.presets import build
from lightning_dcp.recompute import RecomputeError, RecomputeSwitch, find_families

WIDTH = 8


class Block(nn.Module):
    """Counts how often it runs, without changing anything that it computes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 11)

    def blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net(make: Callable[[], nn.Module] = Block, num_layers: int = 3) -> Net:
    torch.manual_seed(1)
    return Net(make, num_layers)


def gradients(model: nn.Module, ids: Tensor, depth: int) -> list[Tensor | None]:
    switch = RecomputeSwitch(find_families(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(7)
    with switch.depth((depth,) * len(switch.families)):
        return list(torch.autograd.grad(model(ids), parameters, allow_unused=True))


def assert_equal_at_every_depth(model: nn.Module, num_layers: int, ids: Tensor | None = None) -> None:
    ids = torch.arange(10).view(2, 5) if ids is None else ids
    expected = gradients(model, ids, 0)
    assert any(g is not None and g.abs().sum() > 0 for g in expected)
    for depth in range(1, num_layers + 1):
        for got, want in zip(gradients(model, ids, depth), expected, strict=True):
            assert (got is None) == (want is None)
            assert got is None or want is None or torch.equal(got, want)


def test_first_layers_run_twice_and_unused_parameters_stay_unused() -> None:
    """pytorch/pytorch#24005: a parameter without gradient next to recomputed layers."""
    model = net()
    assert_equal_at_every_depth(model, 3)
    for depth in range(4):
        for layer in model.blocks():
            layer.calls.clear()
        grads = gradients(model, torch.arange(10).view(2, 5), depth)
        assert sum(g is None for g in grads) == 6
        assert [len(layer.calls) for layer in model.blocks()] == [2] * depth + [1] * (3 - depth)


def test_two_families_have_a_count_each() -> None:
    model = build("tiny-2d", num_layers=3)
    switch = RecomputeSwitch(find_families(model))
    patches = torch.randn(2, 4, 3, 5)
    parameters = list(model.parameters())
    with switch.depth(()):
        expected = torch.autograd.grad(model(patches).square().sum(), parameters)
    for counts in [(0, 3), (2, 1), (3, 3)]:
        with switch.depth(counts):
            got = torch.autograd.grad(model(patches).square().sum(), parameters)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_frozen_embedding() -> None:
    """huggingface/transformers#21381: with reentrant checkpointing all gradients vanish."""
    model = net()
    model.embedding.requires_grad_(False)
    assert_equal_at_every_depth(model, 3)


def test_dropout_repeats_and_the_generator_ends_where_it_would() -> None:
    """allenai/OLMo-core#828: recompute drew another dropout mask."""
    model = net(lambda: Block(dropout=0.5))
    assert_equal_at_every_depth(model, 3)
    after = []
    for depth in (0, 1, 3):
        gradients(model, torch.arange(10).view(2, 5), depth)
        after.append(torch.get_rng_state())
    assert all(torch.equal(state, after[0]) for state in after)


def test_eval_mode_recomputes_and_no_grad_does_not() -> None:
    model = net().eval()
    assert_equal_at_every_depth(model, 3)
    switch = RecomputeSwitch(find_families(model))
    first = model.blocks()[0]
    first.calls.clear()
    with switch.depth((3,)), torch.no_grad():
        model(torch.arange(10).view(2, 5))
    assert len(first.calls) == 1


def test_state_dict_hooks_and_attributes_are_untouched() -> None:
    """pytorch/pytorch#77224: a wrapper adds a prefix to the keys."""
    model = net()
    seen: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda _m, _a, out: seen.append(out))
    switch = RecomputeSwitch(find_families(model))
    before, modules = list(model.state_dict()), list(model.named_modules())
    attributes = [set(vars(layer)) for layer in model.layers]
    with switch.depth((2,)):
        loss = model(torch.arange(10).view(2, 5))
        assert list(model.state_dict()) == before
        assert list(model.named_modules()) == modules
        loss.backward()
    assert list(model.state_dict()) == before
    assert [set(vars(layer)) for layer in model.layers] == attributes
    assert len(seen) == 1
    net().load_state_dict(model.state_dict())


def test_attributes_return_after_an_error() -> None:
    model = net()
    kept = model.layers[0].forward
    model.layers[0].__dict__["forward"] = kept
    with pytest.raises(KeyError), RecomputeSwitch(find_families(model)).depth((3,)):
        raise KeyError("user")
    assert vars(model.layers[0])["forward"] is kept
    assert "forward" not in vars(model.layers[1])


class ManyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, rotary: dict[str, Any], debug: bool) -> tuple[Tensor, Any]:
        cos, (sin,) = rotary["pair"]
        assert debug
        return torch.tanh(self.linear(x)) * mask * cos + sin, {"sin": sin, "note": "kept"}


class ManyArgumentsNet(Net):
    def __init__(self) -> None:
        super().__init__(ManyArguments)
        self.angle = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.mask = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        rotary = {"pair": (self.angle.cos(), [self.angle.sin()])}
        total: Tensor = x.new_zeros(())
        for layer in self.layers:
            x, extra = layer(x, mask=self.mask, rotary=rotary, debug=True)
            assert extra["note"] == "kept"
            total = total + torch.sum(extra["sin"] * x)
        return total


def test_keyword_arguments_and_nested_tensors_get_their_gradients() -> None:
    """unslothai/unsloth-zoo#1038: tensors in keyword arguments became constants.

    ``debug`` is also the name of an argument of ``torch.utils.checkpoint.checkpoint``.
    """
    torch.manual_seed(0)
    model = ManyArgumentsNet()
    assert_equal_at_every_depth(model, 3)
    assert all(g is not None for g in gradients(model, torch.arange(10).view(2, 5), 3)[:2])


class SelfCheckpointing(Block):
    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda y: F.gelu(self.up(y)), x, use_reentrant=False)
        out: Tensor = x + self.dropout(self.down(inner))
        return out


def test_layer_with_a_checkpoint_of_its_own() -> None:
    """pytorch/pytorch#90105: nested checkpointing."""
    assert_equal_at_every_depth(net(lambda: SelfCheckpointing(0.5)), 3)


def test_backward_from_another_thread() -> None:
    """On CUDA the recompute runs in a thread of autograd."""
    model, ids = net(lambda: Block(0.5)), torch.arange(10).view(2, 5)
    expected = gradients(model, ids, 0)
    got: list[Tensor | None] = []
    torch.manual_seed(7)
    with RecomputeSwitch(find_families(model)).depth((3,)):
        loss = model(ids)
        parameters = list(model.parameters())
        thread = threading.Thread(
            target=lambda: got.extend(torch.autograd.grad(loss, parameters, allow_unused=True))
        )
        thread.start()
        thread.join()
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


class Caching(Block):
    """Appends to a cache that it attends to, as decoders do by default in Hugging Face models."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x)
        keys = torch.cat(self.cache, dim=1)
        out: Tensor = x + self.down(F.gelu(self.up(torch.softmax(x @ keys.mT, -1) @ keys)))
        return out


class ShapeChanging(Block):
    """Raises by itself when it runs a second time."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        out: Tensor = x + self.down(F.gelu(self.up(x).view(2, 5 * len(self.calls), -1)))
        return out


@pytest.mark.parametrize("make", [Caching, ShapeChanging])
def test_layer_that_changes_its_state_is_named(make: Callable[[], nn.Module]) -> None:
    """pytorch/pytorch#155171: a raw shape error (171 against 342) from a growing cache."""
    with pytest.raises(RecomputeError, match=rf"layer \d of 'layers' \({make.__name__}\).*use_cache=False"):
        gradients(net(make), torch.arange(10).view(2, 5), 3)


class Failing(Block):
    """Fails in its recompute for a reason that is not its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        vars(self)["error"] = error

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        if len(self.calls) > 1:
            raise vars(self)["error"]
        return super().forward(x)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        dist.DistBackendError("the communicator was aborted"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"),
    ],
)
def test_errors_of_device_and_network_in_the_recompute_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        gradients(net(lambda: Failing(error)), torch.arange(10).view(2, 5), 1)
    assert caught.value is error


@pytest.mark.parametrize("counts", [(4,), (-1,), (1, 1)])
def test_counts_out_of_range(counts: tuple[int, ...]) -> None:
    switch = RecomputeSwitch(find_families(net()))
    with pytest.raises(ValueError, match=r"allowed are counts from 0 up to \(3,\)"), switch.depth(counts):
        pass


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def compile_layers(model: Net, how: str, backend: Any) -> nn.Module:
    if how == "model":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    for index, layer in enumerate(model.layers):
        if how == "wrapped":
            model.layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
        else:
            layer.compile(backend=backend)
    return model


class Pure(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


@pytest.mark.feature("Trainer", "`torch.compile` of layers or of the model", "also with recomputed layers")
@pytest.mark.parametrize("how", ["wrapped", "in place", "model"])
def test_compiled_layers_equal_eager_ones(how: str) -> None:
    """pytorch/pytorch#144035: forward and recompute saved different tensors."""
    ids = torch.arange(10).view(2, 5)
    expected = gradients(net(Pure), ids, 0)
    with fresh_compiler():
        model = compile_layers(net(Pure), how, "aot_eager")
        for depth in (0, 2, 3, 1, 0):
            for got, want in zip(gradients(model, ids, depth), expected, strict=True):
                assert (got is None) == (want is None)
                assert got is None or want is None or torch.allclose(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_new_lengths_and_depths_do_not_compile_again_for_ever(how: str) -> None:
    """huggingface/accelerate#3543: each new length compiled again until the limit.

    Ten lengths and every depth: at most three graphs of a layer (first length, dynamic length, and once more).
    """
    graphs = 0

    def count(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    with fresh_compiler():
        model = compile_layers(net(Pure), how, count)
        for step, length in enumerate([4, 8, 16, 5, 7, 9, 11, 3, 13, 15]):
            gradients(model, torch.zeros(2, length, dtype=torch.long), step % 4)
    assert 1 <= graphs <= 3 * 3


class Closing(L.LightningModule):
    """Chosen layers recompute in Lightning's own closure: a callback opens the depth around each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Depth(L.Callback):
    def __init__(self, layers: list[str | type] | None, count: int) -> None:
        self.layers, self.count = layers, count

    def on_train_batch_start(self, *arguments: Any) -> None:
        switch = RecomputeSwitch(find_families(arguments[1], self.layers))
        self.open = switch.depth((self.count,))
        self.open.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.open.__exit__(None, None, None)


def fit(layers: list[str | type] | None, count: int) -> tuple[list[Tensor], int]:
    model = Closing()
    trainer = L.Trainer(
        max_steps=2, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Depth(layers, count)],
    )  # fmt: skip
    torch.manual_seed(3)
    data = RandomDataset(WIDTH, 8)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    return [p.detach() for p in model.parameters()], sum(
        len(x.calls) for x in model.modules() if isinstance(x, Block)
    )


def test_chosen_layers_under_the_closure_of_lightning() -> None:
    """Lightning-AI/pytorch-lightning#19267: layers given to the strategy failed under Lightning's closure."""
    expected, calls = fit(None, 0)
    assert calls == 4 * 3
    choices: list[list[str | type]] = [[Block], ["Block"], ["layers"]]
    for layers in choices:
        got, calls = fit(layers, 2)
        assert calls == 4 * (3 + 2)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
