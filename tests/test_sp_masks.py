"""Masks: what ranks may differ in, what is refused, and that no exchange depends on any of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dcp.sequence_parallel import attention
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from tests.pool import Pool
from tests.sp_tools import counted_collectives, randn, shard_of, sum_over, world_group

B, H, S, D = 2, 4, 8, 4
LENGTHS = (3, 7)
EXCHANGES = ["all_to_all_single"] * 4


def _context(group: SPGroup, lengths: tuple[int, ...] = LENGTHS) -> MicroBatchContext:
    return MicroBatchContext(
        group=group, sample_ids=tuple(range(len(lengths))), shapes=tuple((n,) for n in lengths), padded_shape=(S,)
    )


def _call(context: MicroBatchContext, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> list[Tensor]:
    """Output and gradients of one call inside the micro-batch; checks the number of exchanges."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    with activate(context), counted_collectives() as called:
        output = attention(leaves[0], leaves[1], leaves[2], **kwargs)
        gradients = torch.autograd.grad(output.sum(), leaves)
    assert called == EXCHANGES, called
    return [output.detach(), *gradients]


def _pads_change_nothing() -> None:
    group = world_group()
    real_BS = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    real = real_BS[:, None, :, None]
    whole = [randn(i, B, H, S, D) for i in range(3)]
    # Ranks whose shard has no pad give no mask, as models do that drop a mask of ones.
    mine = shard_of(real_BS, 1, group)
    mask = None if mine.all() else mine[:, None, None, :]
    results = []
    for pad in (0.0, 1e4, 1e9):
        filled = [tensor.masked_fill(~real, pad) for tensor in whole]
        filled[0] = whole[0].masked_fill(~real, min(pad, 1e4))
        leaves = [shard_of(tensor, 2, group).clone().requires_grad_() for tensor in filled]
        with activate(_context(group)) as context, counted_collectives() as called:
            output = attention(leaves[0], leaves[1], leaves[2], attn_mask=mask)
            kept = torch.where(shard_of(real, 2, group), output, 0.0)
            gradients = torch.autograd.grad(kept.square().sum(), leaves)
        assert called == EXCHANGES
        assert not context.failures
        assert context.masks_differ is not None
        assert not context.masks_differ
        results.append([kept.detach(), *gradients])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a - b).abs().max() < 1e-12
    # Sample 0 alone, without padding, in one process.
    query, key, value = (tensor[:1, :, : LENGTHS[0]] for tensor in whole)
    alone = functional.scaled_dot_product_attention(query, key, value)
    start = group.rank * (S // group.size)
    for token in range(S // group.size):
        if start + token < LENGTHS[0]:
            assert (results[0][0][:1, :, token] - alone[:, :, start + token]).abs().max() < 1e-13


@pytest.mark.parametrize("world_size", [2, 4])
def test_pads_change_nothing_though_ranks_have_different_masks(pool: Pool, world_size: int) -> None:
    """Covers vllm-project/vllm-omni#672, huggingface/diffusers#13278 and the rank-dependent masks of padding: a
    rank without pads has no mask, its peers have one. Pads hold 0, 1e4 and 1e9.
    """
    pool.run(_pads_change_nothing, world_size)


def _seven_tokens() -> list[float]:
    group = world_group()
    whole = (
        torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 1e9], dtype=torch.float64)
        .view(1, 1, 8, 1)
        .expand(1, group.size, 8, 1)
    )
    mask = shard_of(torch.arange(8) < 7, 0, group).view(1, 1, 1, -1)
    value = shard_of(whole, 2, group)
    zero = torch.zeros_like(value)
    output = _call(_context(group, (7,)), zero, zero, value, attn_mask=mask)[0]
    return output[0, 0, :, 0].tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_seven_tokens_all_take_part(pool: Pool, world_size: int) -> None:
    """Covers NVIDIA/Megatron-LM#1669: length 7 in 2 shards was treated as 6 tokens."""
    means = [mean for shard in pool.run(_seven_tokens, world_size) for mean in shard]
    assert means == pytest.approx([10 / 7] * 8, rel=1e-14)


def _masks_that_differ(name: str) -> tuple[bool, list[str]]:
    group = world_group()
    shard = S // group.size
    keys = torch.ones(1, 1, 1, shard, dtype=torch.bool)
    hidden = keys.clone()
    hidden[..., -1] = False
    last = group.rank == group.size - 1
    options: dict[str, dict[str, Any]] = {
        "all ones against none": {"attn_mask": keys if last else None},
        "hidden key against none": {"attn_mask": hidden if last else None},
        "causal against none": {"is_causal": last},
        "causal against hidden key": {"is_causal": not last, "attn_mask": hidden if last else None},
        "full against none": {"attn_mask": torch.ones(S, S, dtype=torch.bool).tril() if last else None},
        "full against causal": {
            "is_causal": not last,
            "attn_mask": torch.ones(S, S, dtype=torch.bool).tril() if last else None,
        },
        "refused against none": {"attn_mask": torch.ones(shard, shard, dtype=torch.bool) if last else None},
    }
    context = _context(group, (S, S))
    tensors = [shard_of(randn(i, B, H, S, D), 2, group) for i in range(3)]
    result = _call(context, tensors[0], tensors[1], tensors[2], **options[name])
    assert all(torch.isfinite(tensor).all() for tensor in result)
    assert context.masks_differ is not None
    return bool(context.masks_differ), context.failures


@pytest.mark.parametrize(
    ("name", "noticed"),
    [
        ("all ones against none", False),
        ("hidden key against none", True),
        ("causal against none", True),
        ("causal against hidden key", True),
        ("full against none", True),
        ("full against causal", True),
        ("refused against none", True),
    ],
)
def test_ranks_that_disagree_are_noticed_and_do_not_hang(pool: Pool, name: str, noticed: bool) -> None:
    answers = pool.run(_masks_that_differ, 2, name)
    assert any(differ for differ, _ in answers) is noticed
    # Only a rank that was itself given something to refuse has a reason to write.
    assert [bool(failures) for _, failures in answers] == [False, name.startswith("refused")]


def _refused(name: str) -> list[str]:
    group = world_group()
    shard = S // group.size
    query, key, value = (shard_of(randn(i, B, H, S, D), 2, group) for i in range(3))
    bias = torch.zeros(1, 1, 1, shard, dtype=torch.float64, requires_grad=True)
    calls: dict[str, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = {
        "local causal": (query, key, value, {"attn_mask": torch.ones(shard, shard).bool().tril()}),
        "local query": (query, key, value, {"attn_mask": torch.zeros(shard, S, dtype=torch.float64)}),
        "both": (query, key, value, {"attn_mask": torch.ones(1, shard).bool(), "is_causal": True}),
        "gradient": (query, key, value, {"attn_mask": bias}),
        "integer": (query, key, value, {"attn_mask": torch.ones(1, shard, dtype=torch.int64)}),
        "batch": (query, key, value, {"attn_mask": torch.ones(3, 1, 1, shard).bool()}),
        "heads": (query, key, value, {"attn_mask": torch.ones(1, 3, 1, shard).bool()}),
        "five axes": (query, key, value, {"attn_mask": torch.ones(1, 1, 1, 1, shard).bool()}),
        "cross": (query, key[:, :, :1], value[:, :, :1], {}),
        "cross longer": (query, key.repeat(1, 1, 3, 1), value.repeat(1, 1, 3, 1), {}),
        "cross batch": (query, key[:1], value[:1], {}),
    }
    context = _context(group, (S, S))
    query, key, value, options = calls[name]
    for _ in range(2):
        result = _call(context, query, key, value, **options)
        assert result[0].shape == query.shape
        assert [tensor.shape for tensor in result[1:]] == [query.shape, key.shape, value.shape]
        assert all(torch.isfinite(tensor).all() for tensor in result)
    assert context.interceptions == 2
    return context.failures


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local causal", ["(4, 4)", "4 of 8 tokens", "[.., 1 or 8, 8]", "build it from the full length"]),
        ("local query", ["(4, 8)", "allowed are"]),
        ("both", ["together with is_causal"]),
        ("gradient", ["needs a gradient"]),
        ("integer", ["torch.int64"]),
        ("batch", ["(3, 1, 1, 4)", "batch 2"]),
        ("heads", ["(1, 3, 1, 4)", "4 heads"]),
        ("five axes", ["(1, 1, 1, 1, 4)"]),
        ("cross", ["cross-attention of 4 query tokens to 1 key", "p = 2", "local_attention"]),
        ("cross longer", ["cross-attention of 4 query tokens to 12 key"]),
        ("cross batch", ["batch 2, 1, 1"]),
    ],
)
def test_refused_by_name_with_the_same_exchanges(pool: Pool, name: str, words: list[str]) -> None:
    """Covers NVIDIA/TensorRT-LLM#15303 (cross-attention); a reason is written once, not once per layer."""
    for failures in pool.run(_refused, 2, name):
        assert len(failures) == 1, failures
        assert all(word in failures[0] for word in words), failures[0]


def _shapes_without_a_sharded_form() -> list[list[str]]:
    group = world_group()
    x = randn(0, B, H, 3, D)
    calls: list[tuple[Callable[[], Tensor], torch.Size]] = [
        (lambda: attention(x[:, :3], x[:, :3], x[:, :3]), x[:, :3].shape),
        (lambda: attention(x[0], x[0], x[0]), x[0].shape),
        (lambda: attention(x, x[:, :1], x[:, :1], enable_gqa=True), x.shape),
    ]
    found = []
    for call, shape in calls:
        with activate(_context(group)) as context:
            output = call()
        assert output.shape == shape
        assert torch.isfinite(output).all()
        found.append(context.failures)
    return found


def test_heads_and_axes_without_a_sharded_form(pool: Pool) -> None:
    """Covers deepspeedai/DeepSpeed#6392: a refusal that names heads and p instead of a wrong result."""
    for three_heads, three_axes, one_kv_head in pool.run(_shapes_without_a_sharded_form, 2):
        assert "3 heads and 3 key/value heads cannot be shared by p = 2 ranks" in three_heads[0]
        assert "[B, H, S, D]" in three_axes[0]
        assert one_kv_head == []


def _full_bias_gradient() -> float:
    group = world_group()
    query, key, value = (randn(i, B, H, S, D) for i in range(3))
    worst = 0.0
    for heads in (1, H):
        bias = randn(9, 1, heads, S, S)
        whole = bias.clone().requires_grad_()
        expected = torch.autograd.grad(
            functional.scaled_dot_product_attention(query, key, value, attn_mask=whole).square().sum(), whole
        )[0]
        here = bias.clone().requires_grad_()
        with activate(_context(group, (S, S))) as context:
            q, k, v = (shard_of(t, 2, group) for t in (query, key, value))
            output = attention(q.requires_grad_(), k, v, attn_mask=here)
            (gradient,) = torch.autograd.grad(output.square().sum(), here)
        assert not context.failures
        worst = max(worst, float((sum_over(group, gradient) - expected).abs().max() / expected.abs().max()))
    return worst


def test_gradient_of_a_learned_bias_over_the_full_length(pool: Pool) -> None:
    """A relative position bias ``[1, H, S, S]``: each rank holds the gradient of its heads, the sum is exact."""
    assert max(pool.run(_full_bias_gradient, 2)) < 1e-12


def _nothing_visible() -> None:
    group = world_group()
    query, key, value = (shard_of(randn(i, B, H, S, D), 2, group) for i in range(3))
    shard = S // group.size
    mask = torch.ones(B, 1, 1, shard, dtype=torch.bool)
    mask[0] = False
    result = _call(_context(group, (S, S)), query, key, value, attn_mask=mask)
    assert all(torch.isfinite(tensor).all() for tensor in result)
    assert all((tensor[0] == 0).all() for tensor in result)
    assert (result[0][1] != 0).all()


def test_sample_without_a_visible_key_is_zero_not_nan(pool: Pool) -> None:
    """As in one process, where torch gives zeros for a row without a visible key."""
    pool.run(_nothing_visible, 2)


def _short_dtypes(dtype: torch.dtype) -> float:
    group = world_group()
    query, key, value = (randn(i, B, H, S, D, dtype=dtype) for i in range(3))
    real = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    bias = torch.zeros(B, 1, 1, S).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
    expected = functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=bias.float()
    )
    q, k, v = (shard_of(t, 2, group) for t in (query, key, value))
    found = _call(_context(group), q, k, v, attn_mask=shard_of(bias, 3, group))
    assert all(tensor.dtype == dtype for tensor in found)
    return float((found[0].float() - shard_of(expected, 2, group)).abs().max())


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_short_dtypes_with_a_float32_mask(pool: Pool, dtype: torch.dtype, limit: float) -> None:
    assert max(pool.run(_short_dtypes, 2, dtype)) < limit


def _autocast() -> None:
    group = world_group()
    query, key, value = (randn(i, B, H, S, D, dtype=torch.float32) for i in range(3))
    original, sent = dist.all_to_all_single, []

    def spy(received: Tensor, buffer: Tensor, **kwargs: Any) -> Any:
        sent.append(buffer.dtype)
        return original(received, buffer, **kwargs)

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", spy)
        expected = functional.scaled_dot_product_attention(query, key, value)
        q, k, v = (shard_of(t, 2, group) for t in (query, key, value))
        found = _call(_context(group, (S, S)), q, k, v)
    assert sent == [torch.bfloat16] * 4
    assert found[0].dtype == expected.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    assert (found[0].float() - shard_of(expected, 2, group).float()).abs().max() < 2e-2


def test_autocast_casts_before_the_exchange(pool: Pool) -> None:
    pool.run(_autocast, 2)


@pytest.mark.parametrize(
    ("shapes", "padded", "packed", "has_padding"),
    [
        (((8,), (8,)), (8,), False, False),
        (((3,), (8,)), (8,), False, True),
        (((4, 6), (4, 5)), (4, 6), False, True),
        (((3,), (5,)), (8,), True, False),
        (((3,), (4,)), (8,), True, True),
    ],
)
def test_padding_is_known_without_communication(
    shapes: tuple[tuple[int, ...], ...], padded: tuple[int, ...], packed: bool, has_padding: bool
) -> None:
    context = MicroBatchContext(shapes=shapes, padded_shape=padded, packed=packed)
    assert context.has_padding is has_padding
