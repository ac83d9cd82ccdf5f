"""Exchanges of a sequence-parallel group. The backward of each is its exact adjoint.

Then the sum of the parameter gradients over all ranks is right for any mix of sharded and replicated
computation, provided that each item of the loss is counted once:

====================  ============================  ==================================
forward               backward                      collectives (forward + backward)
====================  ============================  ==================================
``to_heads``          ``to_tokens``                 1 + 1
``to_tokens``         ``to_heads``                  1 + 1
``switch(a, b)``      ``switch(b, a)``              1 + 1
``gather``            sum over ranks, own slice     1 + 1
``split``             zero pad                      none
====================  ============================  ==================================

Every rank of the group must call the same exchanges in the same order; no other rank takes part.
Shapes: B samples, s tokens of a shard, S = p s tokens, h heads of a rank, H = p h heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.sequence_parallel.context import ExchangeError, SPGroup, current


def to_heads(
    query_BHsD: Tensor, key_BHsD: Tensor, value_BHsD: Tensor, note_BNs1: Tensor, group: SPGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From a shard of the tokens with all heads to all tokens with ``1/p`` of the heads, in one message (Ulysses).

    Each tensor ``[B, H_i, s, D_i]`` becomes ``[B, H_i / p, S, D_i]``; numbers of heads and head sizes may differ.
    The results are strided views of one receive buffer. The note gets no gradient.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _apply(
        _ToHeads, group, query_BHsD, key_BHsD, value_BHsD, note_BNs1
    )
    return result


def to_tokens(output_BhSD: Tensor, group: SPGroup) -> Tensor:
    """Inverse of :func:`to_heads` for one tensor: ``[B, H / p, S, D]`` to ``[B, H, s, D]``.

    The result lies in memory as ``[B, s, H, D]``, so that ``transpose(1, 2).flatten(2)`` is a view.
    """
    result: Tensor = _apply(_ToTokens, group, output_BhSD)
    return result


def gather(x: Tensor, dim: int = 1, group: SPGroup | None = None) -> Tensor:
    """Concatenate the shards of all ranks of the group along ``dim``; every rank gets the whole.

    The backward sums the gradients of all ranks and returns this rank's slice. What is computed alike on every
    rank from gathered activations must therefore count ``1 / p`` on each of them.

    Args:
        x: this rank's shard; the same shape on all ranks.
        dim: axis that is sharded.
        group: defaults to the group of the running micro-batch.
    """
    group = current().group if group is None else group
    if group.size == 1:
        return x
    current().gathers += 1
    result: Tensor = _apply(_Gather, group, dim % x.dim(), x)
    return result


def split(x: Tensor, dim: int = 1, group: SPGroup | None = None) -> Tensor:
    """Take this rank's contiguous part of a tensor that every rank holds whole; the backward pads with zeros.

    Raises:
        ValueError: the size along ``dim`` is no multiple of ``p``.
    """
    group = current().group if group is None else group
    if group.size == 1:
        return x
    length = _part(x, dim, group)
    return x.narrow(dim, group.rank * length, length)


def switch(x: Tensor, from_dim: int, to_dim: int, group: SPGroup | None = None) -> Tensor:
    """Move the sharding from one axis to another: whole along ``from_dim``, ``1 / p`` of ``to_dim`` afterwards.

    For attention over one axis of two-dimensional data (frames or patches): half the bytes of :func:`to_heads`
    and back, and ``p`` is not bounded by the heads. Counts as an interception, since the model shards by itself.

    Raises:
        ValueError: the axes are equal, or the size along ``to_dim`` is no multiple of ``p``.
    """
    group = current().group if group is None else group
    if group.size == 1:
        return x
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    if from_dim == to_dim:
        raise ValueError(f"switch from axis {from_dim} to itself; the two axes must differ")
    _part(x, to_dim, group)
    result: Tensor = _apply(_Switch, group, from_dim, to_dim, x)
    return result


def _part(x: Tensor, dim: int, group: SPGroup) -> int:
    length, rest = divmod(x.shape[dim], group.size)
    if rest:
        raise ValueError(
            f"axis {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {group.size} equal parts; "
            f"pad it to a multiple of {group.size}"
        )
    return length


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run an exchange outside of compiled graphs, which would hold the group of one micro-batch."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: SPGroup, query: Tensor, key: Tensor, value: Tensor, note: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        outputs = _tokens_to_heads((query, key, value, note), group)
        ctx.mark_non_differentiable(outputs[3])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_heads_to_tokens(gradients[:3], ctx.group), None)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SPGroup, output: Tensor) -> Tensor:
        ctx.group = group
        return _heads_to_tokens((output,), group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _tokens_to_heads((gradient,), ctx.group)[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SPGroup, dim: int, x: Tensor) -> Tensor:
        ctx.group, ctx.dim = group, dim
        shard = x.movedim(dim, 0).contiguous()
        whole = shard.new_empty(group.size, *shard.shape)
        try:
            dist.all_gather(list(whole.unbind(0)), shard, group=group.handle)
        except RuntimeError as error:
            raise _ended(group, error) from error
        return whole.flatten(0, 1).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        # All-to-all and a sum in rank order instead of reduce-scatter: every backend has it, the order is fixed,
        # and half precision is summed in float32.
        parts = torch.unflatten(gradient.movedim(ctx.dim, 0), 0, (ctx.group.size, -1)).contiguous()
        return None, None, _all_to_all(parts, ctx.group).sum(0).movedim(0, ctx.dim)


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SPGroup, from_dim: int, to_dim: int, x: Tensor) -> Tensor:
        ctx.group, ctx.from_dim, ctx.to_dim = group, from_dim, to_dim
        current().interceptions += 1
        return _move_shards(x, from_dim, to_dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, _move_shards(gradient, ctx.to_dim, ctx.from_dim, ctx.group)


def _move_shards(x: Tensor, from_dim: int, to_dim: int, group: SPGroup) -> Tensor:
    # [p, from / p, .., to / p, ..]: the received parts then stand in the order of from_dim without a copy.
    parts = torch.stack(x.chunk(group.size, to_dim)).movedim(from_dim + 1, 1).contiguous()
    return _all_to_all(parts, group).flatten(0, 1).movedim(0, from_dim)


def _tokens_to_heads(tensors: Sequence[Tensor], group: SPGroup) -> tuple[Tensor, ...]:
    """``[B, H_i, s, D_i]`` each to ``[B, H_i / p, S, D_i]``, views of one buffer ``[S, B, sum h_i D_i]``.

    Example, p = 2, H = 4: rank 1 gets heads 2 and 3; in its buffer the tokens of rank 0 stand before its own.
    """
    p = group.size
    batch, _, shard, _ = tensors[0].shape
    heads = [(t.shape[1] // p, t.shape[3]) for t in tensors]
    send_psBE = tensors[0].new_empty(p, shard, batch, sum(h * d for h, d in heads))
    for slot, tensor, size in zip(_slots(send_psBE, heads), tensors, heads, strict=True):
        slot.copy_(torch.unflatten(tensor, 1, (p, size[0])).permute(1, 3, 0, 2, 4))
    received_SBE = _all_to_all(send_psBE, group).flatten(0, 1)
    return tuple(slot.permute(1, 2, 0, 3) for slot in _slots(received_SBE, heads))


def _heads_to_tokens(tensors: Sequence[Tensor], group: SPGroup) -> tuple[Tensor, ...]:
    """``[B, H_i / p, S, D_i]`` each to ``[B, H_i, s, D_i]``, stored as ``[B, s, H_i, D_i]``."""
    p = group.size
    batch, _, length, _ = tensors[0].shape
    heads = [(t.shape[1], t.shape[3]) for t in tensors]
    send_psBE = tensors[0].new_empty(p, length // p, batch, sum(h * d for h, d in heads))
    for slot, tensor in zip(_slots(send_psBE, heads), tensors, strict=True):
        slot.copy_(torch.unflatten(tensor, 2, (p, length // p)).permute(2, 3, 0, 1, 4))
    received_psBE = _all_to_all(send_psBE, group)
    slots_psBhD = _slots(received_psBE, heads)
    return tuple(slot.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2) for slot in slots_psBhD)


def _slots(buffer: Tensor, heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views ``[..., h_i, D_i]`` of a buffer ``[..., sum h_i D_i]``."""
    parts = buffer.split_with_sizes([h * d for h, d in heads], dim=-1)
    return [torch.unflatten(part, -1, size) for part, size in zip(parts, heads, strict=True)]


def _all_to_all(send: Tensor, group: SPGroup) -> Tensor:
    """Part ``j`` of axis 0 goes to rank ``j``; part ``j`` of the result came from rank ``j``. Its own adjoint."""
    received = torch.empty_like(send)
    try:
        dist.all_to_all_single(received, send, group=group.handle)
    except RuntimeError as error:
        raise _ended(group, error) from error
    return received


def _ended(group: SPGroup, error: RuntimeError) -> ExchangeError:
    return ExchangeError(f"an exchange of the group of ranks {group.ranks[0]}..{group.ranks[-1]} ended: {error}")
