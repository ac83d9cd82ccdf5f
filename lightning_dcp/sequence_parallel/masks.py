"""What an attention mask means once the tokens of all shards stand together.

Padding gives ranks different masks, or a mask to one rank and none to the next. So the exchange never depends on
the mask: every rank always sends a note, one row per token with the additive bias of this key for each head and
the kind of mask that the rank was given. After the exchange every rank knows both for all tokens.

Shapes: B samples, s tokens of a shard, S = p s tokens of the sequence, h heads of a rank, H = p h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup


class Kind(IntEnum):
    """What restricts the attention beyond a bias per key; must be the same on all ranks of a group."""

    OPEN = 0
    CAUSAL = 1
    FULL = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPlan:
    """The mask of one call, sorted by what must happen to it.

    Attributes:
        kind: what the other ranks must have too.
        key_bias_BHs: additive bias of this shard's keys; ``None`` if the rank has no mask of its keys.
        full: mask over all ``S`` keys, cut to this rank's heads, used as it is.
        refusal: why the call cannot be sharded; empty if it can.
    """

    kind: Kind
    key_bias_BHs: Tensor | None = None
    full: Tensor | None = None
    refusal: str = ""


def read_mask(attn_mask: Tensor | None, query_BHsD: Tensor, group: SPGroup, *, is_causal: bool) -> MaskPlan:
    """Tell a mask of this shard's keys from one over the whole sequence and refuse the rest by name."""
    if attn_mask is None:
        return MaskPlan(kind=Kind.CAUSAL if is_causal else Kind.OPEN)
    batch, heads, shard, _ = query_BHsD.shape
    refusal = _refusal(attn_mask, query_BHsD, group, is_causal=is_causal)
    if refusal:
        return MaskPlan(kind=Kind.REFUSED, refusal=refusal)
    mask_BHQK = attn_mask[(None,) * (4 - attn_mask.dim())]
    if mask_BHQK.shape[-1] == shard:
        bias_BHs = _additive(mask_BHQK, query_BHsD.dtype)[:, :, 0].expand(batch, heads, shard)
        return MaskPlan(kind=Kind.OPEN, key_bias_BHs=bias_BHs)
    if mask_BHQK.shape[1] > 1:
        own = heads // group.size
        mask_BHQK = mask_BHQK.narrow(1, group.rank * own, own)
    if mask_BHQK.dtype != torch.bool:
        mask_BHQK = mask_BHQK.to(query_BHsD.dtype)
    return MaskPlan(kind=Kind.FULL, full=mask_BHQK)


def _refusal(attn_mask: Tensor, query_BHsD: Tensor, group: SPGroup, *, is_causal: bool) -> str:
    batch, heads, shard, _ = query_BHsD.shape
    length = shard * group.size
    shape = tuple(attn_mask.shape)
    if is_causal:
        return f"attn_mask of shape {shape} together with is_causal; give one of them"
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        return f"attn_mask of dtype {attn_mask.dtype}; use a bool or a float mask"
    padded = (1,) * (4 - len(shape)) + shape
    full = padded[-1] == length and padded[-2] in (1, length)
    local = padded[-1] == shard and padded[-2] == 1
    if len(shape) > 4 or not (full or local) or padded[0] not in (1, batch) or padded[1] not in (1, heads):
        return (
            f"attn_mask of shape {shape} for {shard} of {length} tokens, batch {batch}, {heads} heads on "
            f"{group.size} ranks; allowed are a mask of this shard's keys [.., 1, {shard}], masks over the whole "
            f"sequence [.., 1 or {length}, {length}], or is_causal. A mask built from the length of the shard "
            "cannot see the other shards: build it from the full length, or allow p = 1 only"
        )
    if local and attn_mask.requires_grad:
        return (
            f"attn_mask of shape {shape} over this shard's keys needs a gradient; make it one over {length} keys"
        )
    return ""


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def write_note(plan: MaskPlan, query_BHsD: Tensor, group: SPGroup) -> Tensor:
    """The note to every rank, ``[B, p * (h + 1 + fill), s, 1]``: bias for each of its heads, kind of mask, fill.

    The fill makes rows of the exchanged buffer a multiple of 16 bytes, which CUDA kernels ask of strides.
    """
    batch, heads, shard, _ = query_BHsD.shape
    own = heads // group.size
    quantum = 16 // query_BHsD.element_size()
    width = -(-(own + 1) // quantum) * quantum
    note_BsPN = query_BHsD.new_zeros(batch, shard, group.size, width)
    if plan.key_bias_BHs is not None:
        note_BsPN[..., :own] = torch.unflatten(plan.key_bias_BHs.transpose(1, 2), 2, (group.size, own))
    note_BsPN[..., own] = float(plan.kind)
    return note_BsPN.flatten(2).transpose(1, 2).unsqueeze(-1)


def read_note(note_BNS1: Tensor, plan: MaskPlan, own_heads: int, context: MicroBatchContext) -> Tensor | None:
    """The mask that the local attention uses; notes in the context, on the device, where the ranks disagree.

    Padding somewhere in the micro-batch is known on all ranks, a mask on another rank is not: so with padding the
    received bias is used even by a rank that was given no mask.
    """
    bias_BhS = note_BNS1[:, :own_heads, :, 0]
    uses_bias = plan.kind is Kind.OPEN and (plan.key_bias_BHs is not None or context.has_padding)
    differ = (note_BNS1[:, own_heads, :, 0] != float(plan.kind)).any()
    if not uses_bias:
        differ = differ | (bias_BhS != 0).any()
    before = context.masks_differ
    context.masks_differ = differ.float() if before is None else torch.maximum(before, differ.float())
    if plan.full is not None:
        return plan.full
    return bias_BhS.contiguous().unsqueeze(2) if uses_bias else None
