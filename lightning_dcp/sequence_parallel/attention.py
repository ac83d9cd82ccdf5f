"""Scaled dot-product attention over a sequence that is sharded over the ranks of a group (Ulysses).

Two messages per call forward and two backward: query, key, value and note go out together, the output comes back.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_dcp.sequence_parallel.backend import AttentionOptions, attend, exposed_sdpa
from lightning_dcp.sequence_parallel.context import MicroBatchContext, current
from lightning_dcp.sequence_parallel.masks import read_mask, read_note, write_note
from lightning_dcp.sequence_parallel.ulysses import to_heads, to_tokens


def attention(
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` over the whole sequence, whatever the sequence-parallel size ``p``.

    Under ``p > 1`` the tensors hold this rank's ``s = S / p`` tokens and all heads. ``p`` must divide the heads,
    and divide or be a multiple of the key/value heads. What cannot be sharded is written to
    ``current().failures`` and the result is void, but finite and of the right shape: an exception on one rank
    would leave the others waiting.

    Args:
        query_BHSD: ``[B, H, s, D]``.
        key_BHSD: ``[B, Hkv, s, D]``.
        value_BHSD: ``[B, Hkv, s, Dv]``.
        attn_mask: bool (True = may be seen) or additive float. Under ``p > 1`` either over this shard's keys,
            ``[B or 1, H or 1, 1, s]``, or over the whole sequence, ``[B or 1, H or 1, 1 or S, S]``.
        dropout_p: probability of dropping an attention weight.
        is_causal: token ``i`` of the whole sequence sees tokens ``0 .. i``.
        scale: factor of the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: allow ``Hkv < H``.

    Returns:
        ``[B, H, s, Dv]``.
    """
    options = AttentionOptions(
        sdpa=exposed_sdpa(), dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return sharded_attention(query_BHSD, key_BHSD, value_BHSD, attn_mask, options)


def local_attention(
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` over what this rank holds, never exchanged.

    For attention along an axis that is not sharded: the patches of a frame, or either axis after
    :func:`~lightning_dcp.sequence_parallel.switch`. Arguments and result as in :func:`attention` with ``p = 1``.
    """
    options = AttentionOptions(
        sdpa=exposed_sdpa(recorded=False),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return attend(query_BHSD, key_BHSD, value_BHSD, attn_mask, options)


def sharded_attention(
    query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, attn_mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """:func:`attention` with its settings in one value; chooses between one rank and a group."""
    if current().group.size == 1:
        return attend(query_BHSD, key_BHSD, value_BHSD, attn_mask, options)
    result: Tensor = _over_group(query_BHSD, key_BHSD, value_BHSD, attn_mask, options)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_group(
    query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, attn_mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attention over a group of more than one rank.

    Never compiled: what changes between micro-batches (counters, lengths, padding) would become part of the graph
    around it, until the limit of recompilations is reached.
    """
    context = current()
    context.interceptions += 1
    tensors = _autocast(query_BHSD, key_BHSD, value_BHSD)
    refusal = _unshardable(*tensors, context.group.size, enable_gqa=options.enable_gqa)
    if refusal:
        _refuse(context, refusal)
        return attend(*tensors, None, options)
    return _exchanged(tensors, attn_mask, options, context)


def _exchanged(
    tensors: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    options: AttentionOptions,
    context: MicroBatchContext,
) -> Tensor:
    group = context.group
    query, key, value = _aligned(tensors, context)
    plan = read_mask(attn_mask, query, group, is_causal=options.is_causal)
    if plan.refusal:
        _refuse(context, plan.refusal)
    if key.shape[1] % group.size:
        # Head j of the copies belongs to rank j; autograd sums the gradients of the copies.
        copies = group.size // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    note = write_note(plan, query, group)
    query, key, value, note = to_heads(query, key, value, note, group)
    mask = read_note(note, plan, query.shape[1], context)
    if mask is not None and query.is_cuda and key.shape[1] < query.shape[1]:
        # Kernels on CUDA that take a mask have no grouped heads and would fall back to S x S scores in memory.
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    local = replace(options, enable_gqa=key.shape[1] < query.shape[1])
    return to_tokens(attend(query, key, value, mask, local), group)


def _autocast(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast would do inside the kernel, but before the exchange: half the bytes."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    query, key, value = tensors
    return query, key, value


def _unshardable(query: Tensor, key: Tensor, value: Tensor, p: int, *, enable_gqa: bool) -> str:
    """Why this call has no sharded form; depends on the model alone, so that all ranks agree."""
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
    if any(t.dim() != 4 for t in (query, key, value)):
        return f"attention on tensors of shapes {shapes}; sharded attention takes [B, H, S, D]"
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        return f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; make them equal"
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != value.shape[1] or heads % kv_heads or (kv_heads not in (1, heads) and not enable_gqa):
        return f"attention with {heads} heads, {kv_heads} key and {value.shape[1]} value heads (shapes {shapes})"
    if heads % p or (kv_heads % p and p % kv_heads):
        return (
            f"attention with {heads} heads and {kv_heads} key/value heads cannot be shared by p = {p} ranks: "
            "p must divide the heads, and divide or be a multiple of the key/value heads; restrict sp_sizes"
        )
    return ""


def _aligned(tensors: tuple[Tensor, Tensor, Tensor], context: MicroBatchContext) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse cross-attention, but keep to the exchanges that the other ranks expect."""
    query, key, value = tensors
    if len({(t.shape[0], t.shape[2]) for t in tensors}) == 1:
        return tensors
    _refuse(
        context,
        f"cross-attention of {query.shape[2]} query tokens to {key.shape[2]} key and {value.shape[2]} value "
        f"tokens (batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}) on p = {context.group.size} ranks: "
        "only attention of a sequence to itself is sharded; use local_attention with the memory whole on every "
        "rank, or allow p = 1 only",
    )
    batch, _, shard, _ = query.shape
    void_key, void_value = (t.mean((0, 2), keepdim=True).expand(batch, -1, shard, -1) for t in (key, value))
    return query, void_key, void_value


def _refuse(context: MicroBatchContext, reason: str) -> None:
    if reason not in context.failures:
        context.failures.append(reason)
