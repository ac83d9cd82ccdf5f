"""Exchanges: the layout in the middle, the way back, and the backward as the exact adjoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_dcp.sequence_parallel import gather, split, switch
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.ulysses import to_heads, to_tokens
from tests.pool import Pool
from tests.sp_tools import counted_collectives, groups_of_this_rank, randn, shard_of, sum_over, world_group


def _round_trip() -> None:
    group = world_group()
    p = group.size
    for batch in (1, 2, 3):
        whole = torch.arange(batch * 2 * p * 3 * p * 5, dtype=torch.float64).view(batch, 2 * p, 3 * p, 5)
        note = torch.arange(batch * p * 3 * p, dtype=torch.float64).view(batch, p, 3 * p, 1)
        first, second, third, last = (shard_of(t, 2, group) for t in (whole, whole + 0.25, whole + 0.5, note))
        query, key, value, got_note = to_heads(first, second, third, last, group)
        assert torch.equal(query, shard_of(whole, 1, group))
        assert torch.equal(key, shard_of(whole, 1, group) + 0.25)
        assert torch.equal(value, shard_of(whole, 1, group) + 0.5)
        assert torch.equal(got_note, shard_of(note, 1, group))
        assert torch.equal(to_tokens(query, group), first)
        assert query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tokens_stay_with_their_sample(pool: Pool, world_size: int) -> None:
    """Covers deepspeedai/DeepSpeed#5808: batch and sequence mixed when B > 1."""
    pool.run(_round_trip if world_size > 1 else _identity_alone, world_size)


def _identity_alone() -> None:
    x = randn(0, 2, 3)
    assert gather(x, 1) is split(x, 1) is switch(x, 0, 1) is x


def _exchanges(group: SPGroup) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Every exchange as a linear map of one tensor, with an input that differs between ranks."""
    p, rank = group.size, group.rank
    x = randn(rank, 2, 2 * p, 3, 4)
    note = randn(rank, 2, p, 3, 1)
    return [
        (lambda t: to_heads(t, t * 2, t[..., :2], note, group)[0], x),
        (lambda t: to_heads(t * 2, t, t[..., :2], note, group)[1], x),
        (lambda t: to_heads(t * 2, t[:, :p], t[..., :2], note, group)[2], x),
        (lambda t: to_tokens(t, group), randn(rank, 2, 3, 2 * p, 4)),
        (lambda t: gather(t, 1, group), x),
        (lambda t: gather(t, -1, group), x),
        (lambda t: split(t, 1, group), x),
        (lambda t: switch(t, 2, 1, group), x),
        (lambda t: switch(t, -2, 0, group), randn(rank, p, 5, 2, 3)),
        (lambda t: switch(t, 0, -1, group), randn(rank, 3, 1, 2 * p)),
    ]


def _adjoint() -> float:
    """``sum_ranks <F x, y> = sum_ranks <x, F' y>`` for every exchange on every group of this rank."""
    worst = 0.0
    for group in groups_of_this_rank():
        if group.size == 1:
            continue
        for index, (function, x) in enumerate(_exchanges(group)):
            leaf = x.clone().requires_grad_()
            output = function(leaf)
            y = randn(100 * index + group.rank, *output.shape)
            (gradient,) = torch.autograd.grad(output, leaf, y)
            assert gradient.shape == x.shape
            left, right = sum_over(group, (output * y).sum()), sum_over(group, (x * gradient).sum())
            worst = max(worst, float((left - right).abs() / left.abs()))
    return worst


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_backward_is_the_adjoint(pool: Pool, world_size: int) -> None:
    """Covers NVIDIA/Megatron-LM#1464, ByteDance-Seed/VeOmni#1120 and deepspeedai/DeepSpeed#7672: in group {2,3}
    of four ranks the group ranks are 0 and 1.
    """
    assert max(pool.run(_adjoint, world_size)) < 1e-12


def _values() -> None:
    for group in groups_of_this_rank():
        p = group.size
        whole = randn(7, 2, 3 * p, 2 * p, 2)
        frames, patches = shard_of(whole, 1, group), shard_of(whole, 2, group)
        assert torch.equal(gather(frames, 1, group), whole)
        assert torch.equal(gather(patches, -2, group), whole)
        assert torch.equal(split(whole, 2, group), patches)
        assert torch.equal(switch(frames, 1, 2, group), patches)
        assert torch.equal(switch(patches, 2, 1, group), frames)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gather_split_switch_give_the_named_parts(pool: Pool, world_size: int) -> None:
    pool.run(_values, world_size)


def _pooled_head() -> tuple[float, float]:
    """A head on the mean over gathered tokens, computed alike on every rank and counted ``1 / p`` there."""
    group = world_group()
    whole, weight, head = randn(1, 2, 4 * group.size, 3), randn(2, 3, 3), randn(3, 3)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w)
        return (gather(hidden, 1, group).mean(1) @ head).square().sum() / group.size

    weight_here = weight.clone().requires_grad_()
    (sharded,) = torch.autograd.grad(loss(shard_of(whole, 1, group), weight_here), weight_here)
    weight.requires_grad_()
    reference = (torch.tanh(whole @ weight).mean(1) @ head).square().sum()
    (expected,) = torch.autograd.grad(reference, weight)
    return float((sum_over(group, sharded) - expected).abs().max()), float(expected.abs().max())


@pytest.mark.parametrize("world_size", [2, 4])
def test_gathered_activations_counted_one_pth(pool: Pool, world_size: int) -> None:
    """Covers ByteDance-Seed/VeOmni#1120: a gather without a sum in backward makes gradients p times too small."""
    for difference, scale in pool.run(_pooled_head, world_size):
        assert difference < 1e-13 * max(1.0, scale)


def _short_dtypes() -> None:
    group = world_group()
    for dtype in (torch.bfloat16, torch.float32):
        x = shard_of(randn(5, 2, 4, 6).to(dtype), 1, group).requires_grad_()
        output = gather(x, 1, group)
        assert output.dtype == dtype
        # 1 + 2^-8 in bfloat16 is 1: a sum in bfloat16 would lose what a sum in float32 keeps.
        y = torch.full_like(output, 1.0 if group.rank == 0 else 2.0**-8)
        (gradient,) = torch.autograd.grad(output, x, y)
        expected = torch.tensor(1 + 3 * 2.0**-8).to(dtype)
        assert (gradient == expected).all()


def test_gradients_of_half_precision_are_summed_in_float32(pool: Pool) -> None:
    pool.run(_short_dtypes, 4)


def _collectives_and_refusals() -> None:
    group = world_group()
    with activate(MicroBatchContext(group=group)) as context:
        x = randn(0, 2, 4, 6).requires_grad_()
        with counted_collectives() as called:
            torch.autograd.grad(gather(x).sum(), x)
        assert called == ["all_gather", "all_to_all_single"]
        assert context.interceptions == 0
        with counted_collectives() as called:
            torch.autograd.grad(switch(x, 1, 2).sum(), x)
        assert called == ["all_to_all_single"] * 2
        assert context.interceptions == 1
        with counted_collectives() as called:
            torch.autograd.grad(split(x).sum(), x)
        assert called == []
        with pytest.raises(ValueError, match="pad it to a multiple of 2"):
            split(randn(0, 2, 5))
        with pytest.raises(ValueError, match="cannot be cut into 2 equal parts"):
            switch(randn(0, 2, 5), 0, 1)
        with pytest.raises(ValueError, match="must differ"):
            switch(x, 1, -2)


def test_number_of_collectives_and_refusals(pool: Pool) -> None:
    pool.run(_collectives_and_refusals, 2)
