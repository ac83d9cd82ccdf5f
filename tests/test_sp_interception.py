"""Reaching unchanged models: what the patch sees, what it leaves behind, recompute and other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_dcp.sequence_parallel import attention, local_attention, loss_sum
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.interception import AttentionRecorder, patched_attention
from tests.pool import Pool
from tests.sp_tools import counted_collectives, randn, shard_of, sum_over, world_group

ORIGINAL = functional.scaled_dot_product_attention
LENGTHS = (5, 8)
S, WIDTH, HEADS = 8, 16, 4


class Block(nn.Module):
    """A causal block that knows nothing of us and calls torch's function by its usual name."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.sizes = (HEADS, kv_heads, kv_heads)
        self.dropout = 0.0
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * (WIDTH // HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSE: Tensor) -> Tensor:
        heads_BHSD = self.qkv(x_BSE).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        query, key, value = heads_BHSD.split(self.sizes, dim=1)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True, enable_gqa=True
        )
        return x_BSE + torch.tanh(self.out(mixed.transpose(1, 2).flatten(2)))


class Blocks(nn.Module):
    def __init__(self, recompute: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.recompute = recompute

    def forward(self, x_BSE: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x_BSE = checkpoint(layer, x_BSE, use_reentrant=False) if index < self.recompute else layer(x_BSE)
        return x_BSE


class Encoder(nn.Module):
    """Torch's own encoder, with a padding mask built from the shard."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x_BSE: Tensor, pads_BS: Tensor | None = None) -> Tensor:
        result: Tensor = self.encoder(x_BSE, src_key_padding_mask=pads_BS)
        return result


class Heads(nn.Module):
    """Multi-head attention without weights, which is the form that calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x_BSE: Tensor, pads_BS: Tensor | None = None) -> Tensor:
        result: Tensor = self.attention(x_BSE, x_BSE, x_BSE, key_padding_mask=pads_BS, need_weights=False)[0]
        return result


def _context(group: SPGroup) -> MicroBatchContext:
    return MicroBatchContext(
        group=group, sample_ids=(0, 1), shapes=tuple((n,) for n in LENGTHS), padded_shape=(S,)
    )


def _real() -> Tensor:
    return torch.arange(S) < torch.tensor(LENGTHS)[:, None]


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def _gradients(
    model: Any, group: SPGroup, *, padded: bool, grad: Callable[..., Any] = torch.autograd.grad
) -> list[Tensor]:
    """Parameter gradients of one step, summed over the group as a training step does."""
    x, target, real = randn(1, 2, S, WIDTH), randn(2, 2, S, WIDTH), _real()
    inputs = [shard_of(t, 1, group) for t in (x, target, real)]
    arguments = (inputs[0], ~inputs[2]) if padded else (inputs[0],)
    errors = (model(*arguments) - inputs[1]).square().mean(-1)
    parameters = list(model.parameters())
    return [sum_over(group, g) for g in grad(loss_sum(errors, inputs[2])["loss"], parameters)]


def _worst(found: list[Tensor], expected: list[Tensor]) -> float:
    total = torch.stack([tensor.norm() for tensor in expected]).norm()
    return max(float((a - b).norm() / total) for a, b in zip(found, expected, strict=True))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool, int]] = {
    "blocks": (Blocks, False, 2),
    "encoder": (Encoder, True, 2),
    "heads": (Heads, True, 1),
}


def _unchanged_model(name: str) -> float:
    make, padded, calls = MODELS[name]
    group, model = world_group(), _model(make)
    expected = _gradients(model, SPGroup(), padded=padded)
    with activate(_context(group)) as context, patched_attention():
        found = _gradients(model, group, padded=padded)
    assert context.interceptions == calls
    assert not context.failures
    assert context.masks_differ is not None
    assert not context.masks_differ
    return _worst(found, expected)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_unchanged_models_train_exactly(pool: Pool, world_size: int, name: str) -> None:
    """Covers huggingface/diffusers#13319 (a whole training step), huggingface/diffusers#13278 (padding masks)."""
    assert max(pool.run(_unchanged_model, world_size, name)) < 1e-13


def _evaluation(name: str) -> float:
    make, padded, calls = MODELS[name]
    group, model = world_group(), _model(make).eval()
    x, real = randn(1, 2, S, WIDTH), _real()
    with torch.no_grad():
        expected = model(x, ~real) if padded else model(x)
        with activate(_context(group)) as context, patched_attention():
            here, pads = shard_of(x, 1, group), ~shard_of(real, 1, group)
            output = model(here, pads) if padded else model(here)
    assert context.interceptions == calls
    assert torch.backends.mha.get_fastpath_enabled()
    return float(((output - shard_of(expected, 1, group)) * shard_of(real, 1, group)[..., None]).abs().max())


@pytest.mark.parametrize("name", list(MODELS))
def test_evaluation_does_not_take_the_fused_path_around_us(pool: Pool, name: str) -> None:
    assert max(pool.run(_evaluation, 2, name)) < 1e-13


def _recompute(recompute: int, in_thread: bool) -> tuple[float, list[str]]:
    group, model = world_group(), _model(lambda: Blocks(recompute))
    expected = _gradients(_model(Blocks), SPGroup(), padded=False)
    problems: list[BaseException] = []

    def grad(loss: Tensor, parameters: list[Tensor]) -> Any:
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(torch.autograd.grad(loss, parameters))
            except BaseException as error:
                problems.append(error)

        if in_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        assert not problems, problems
        return result[0]

    with activate(_context(group)), patched_attention(), counted_collectives() as called:
        found = _gradients(model, group, padded=False, grad=grad)
    return _worst(found, expected), [name for name in called if name != "all_reduce"]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_recompute_is_exact_from_any_thread(pool: Pool, recompute: int, in_thread: bool) -> None:
    """On CUDA autograd recomputes in a thread of its own. Two exchanges forward, two backward, two recomputed."""
    for worst, called in pool.run(_recompute, 2, recompute, in_thread):
        assert worst < 1e-13
        assert called == ["all_to_all_single"] * (2 * 4 + 2 * recompute)


def _compiled() -> tuple[float, list[int]]:
    group, model = world_group(), _model(Blocks)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=backend)
    expected = _gradients(model, SPGroup(), padded=False)
    worst, after_step = 0.0, []
    for _ in range(6):
        with activate(_context(group)) as context, patched_attention():
            worst = max(worst, _worst(_gradients(compiled, group, padded=False), expected))
        assert context.interceptions == 2
        worst = max(worst, _worst(_gradients(compiled, SPGroup(), padded=False), expected))
        after_step.append(graphs)
    return worst, after_step


def test_compiled_model_is_exact_and_compiled_once_for_each_form(pool: Pool) -> None:
    for worst, after_step in pool.run(_compiled, 2):
        assert worst < 1e-13
        assert after_step == [after_step[0]] * 6


def _raise_inside(group: SPGroup) -> None:
    with activate(_context(group)), patched_attention():
        assert functional.scaled_dot_product_attention is not ORIGINAL
        assert not torch.backends.mha.get_fastpath_enabled()
        with patched_attention():
            pass
        assert functional.scaled_dot_product_attention is not ORIGINAL
        raise ZeroDivisionError


def _nothing_left(group: SPGroup) -> None:
    fast = torch.backends.mha.get_fastpath_enabled()
    for setting in (True, False):
        torch.backends.mha.set_fastpath_enabled(setting)
        with pytest.raises(ZeroDivisionError):
            _raise_inside(group)
        assert functional.scaled_dot_product_attention is ORIGINAL
        assert torch.backends.mha.get_fastpath_enabled() is setting
    torch.backends.mha.set_fastpath_enabled(fast)


def test_nothing_is_left_after_an_exception() -> None:
    _nothing_left(SPGroup())


def _nested() -> None:
    group, model = world_group(), _model(Blocks)
    x = randn(1, 2, S, WIDTH)
    expected = model(x)
    with (
        activate(_context(group)) as context,
        patched_attention(),
        patched_attention(),
        counted_collectives() as called,
    ):
        output = model(shard_of(x, 1, group))
    assert called == ["all_to_all_single"] * 4
    assert context.interceptions == 2
    assert (output - shard_of(expected, 1, group)).abs().max() < 1e-13


def test_opening_the_patch_twice_exchanges_once(pool: Pool) -> None:
    pool.run(_nested, 2)


def test_one_rank_is_torch_itself() -> None:
    query, key, value = (randn(i, 2, HEADS, S, 4) for i in range(3))
    expected = ORIGINAL(query, key, value, None, 0.0, True)
    with activate(_context(SPGroup())) as context:
        assert functional.scaled_dot_product_attention is ORIGINAL
        assert torch.equal(attention(query, key, value, is_causal=True), expected)
        with patched_attention():
            assert torch.equal(
                functional.scaled_dot_product_attention(query, key, value, None, 0.0, True), expected
            )
    assert context.interceptions == 0
    assert context.masks_differ is None


def _users_kernel() -> tuple[int, int]:
    calls = 0

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return ORIGINAL(*args, **kwargs)

    group = world_group()
    query, key, value = (shard_of(randn(i, 2, HEADS, S, 4), 2, group) for i in range(3))
    functional.scaled_dot_product_attention = kernel
    try:
        with activate(_context(group)) as context, patched_attention():
            functional.scaled_dot_product_attention(query, key, value)
            attention(query, key, value)
            local_attention(query, key, value)
        assert functional.scaled_dot_product_attention is kernel
    finally:
        functional.scaled_dot_product_attention = ORIGINAL
    return calls, context.interceptions


def test_a_kernel_that_the_user_put_in_place_is_used(pool: Pool) -> None:
    assert pool.run(_users_kernel, 2) == [(3, 2)] * 2


def test_recorder_learns_the_legal_sizes() -> None:
    model = _model(Blocks)
    x = randn(0, 1, S, WIDTH)
    with AttentionRecorder() as recorder:
        model(x)
        query = randn(0, 1, 6, S, 4)
        attention(query, query, query)
        local_attention(query[:, :1], query[:, :1], query[:, :1])
    assert functional.scaled_dot_product_attention is ORIGINAL
    assert recorder.calls == 3
    assert recorder.heads == {(4, 2), (6, 6)}
    assert not recorder.cross_attention
    assert recorder.sp_sizes(6) == (1, 2)
    with AttentionRecorder() as recorder, torch.no_grad():
        _model(Encoder).eval()(x)
    assert recorder.calls == 2
    assert recorder.sp_sizes(6) == (1, 2, 4)
    assert AttentionRecorder().sp_sizes(6) == (1,)
    with AttentionRecorder() as recorder:
        functional.scaled_dot_product_attention(query, query[:, :, :3], query[:, :, :3])
    assert recorder.cross_attention
    assert recorder.sp_sizes(6) == (1,)
    with AttentionRecorder() as recorder:
        functional.scaled_dot_product_attention(query[0], query[0], query[0])
    assert recorder.sp_sizes(6) == (1,)


def test_recorder_leaves_nothing_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), AttentionRecorder():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is ORIGINAL
    assert torch.backends.mha.get_fastpath_enabled()


def _dropout(seed_by_rank: bool) -> tuple[bool, bool]:
    """Whether the heads of two ranks drop the same weights, and whether parameters stay equal on all ranks."""
    group = world_group()
    torch.manual_seed(1 + (group.rank if seed_by_rank else 0))
    zero = torch.zeros(1, 2, S // group.size, S)
    eye = shard_of(torch.eye(S).expand(1, 2, S, S), 2, group)
    with activate(_context(group)):
        kept = attention(zero, zero, eye, dropout_p=0.5) != 0
        drop = functional.dropout(torch.ones(64), 0.5) != 0
    assert 0.2 < kept.double().mean() < 0.8
    others = sum_over(group, drop.double())
    same_shards = bool(((others == 0) | (others == group.size)).all())
    assert same_shards is not seed_by_rank

    model = _model(Blocks)
    for block in model.modules():
        if isinstance(block, Block):
            block.dropout = 0.5
    torch.manual_seed(1 + (group.rank if seed_by_rank else 0))
    for _ in range(3):
        with activate(_context(group)), patched_attention():
            gradients = _gradients(model, group, padded=False)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    in_sync = torch.equal(sum_over(group, flat), flat * group.size)
    return bool((kept[:, 0] == kept[:, 1]).all()), in_sync


@pytest.mark.parametrize("seed_by_rank", [True, False])
def test_dropout_differs_between_the_heads_of_two_ranks(pool: Pool, seed_by_rank: bool) -> None:
    """Covers ecmwf/anemoi-core#595; with one seed for all ranks the masks do repeat, so the test can fail."""
    for repeats, in_sync in pool.run(_dropout, 2, seed_by_rank):
        assert repeats is not seed_by_rank
        assert in_sync
