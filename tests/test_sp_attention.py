"""Sharded attention equals attention of one process, output and gradients, for every group, shape and mask."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_dcp.sequence_parallel import attention
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.topology import legal_sp_sizes
from tests.pool import Pool
from tests.sp_tools import groups_of_this_rank

MaskName = Literal["none", "causal", "key_bool", "key_float", "key_heads", "full_key", "full_bool", "full_float"]
MASKS: tuple[MaskName, ...] = (
    "none", "causal", "key_bool", "key_float", "key_heads", "full_key", "full_bool", "full_float"
)  # fmt: skip
HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (8, 1), (8, 2), (12, 4), (7, 7))


@dataclass(frozen=True)
class Case:
    """One attention call: the lengths are those of the samples, padded to a multiple of ``p``."""

    seed: int
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    mask: MaskName

    def padded(self, p: int) -> int:
        return -(-max(self.lengths) // p) * p


def _cases(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    cases = []
    for index in range(count):
        longest = draw.randint(1, 33)
        lengths = tuple(draw.randint(1, longest) for _ in range(draw.randint(1, 3)))
        cases.append(
            Case(
                seed=index,
                lengths=lengths,
                heads=draw.choice(HEADS),
                head_dims=draw.choice(((4, 4), (8, 8), (4, 6))),
                mask=MASKS[index % len(MASKS)],
            )
        )
    return cases


def _tensors(case: Case, p: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Query, key, value and the gradient of the output, unsharded; and which tokens are real, ``[B, S]``."""
    rng = torch.Generator().manual_seed(case.seed)
    length, batch = case.padded(p), len(case.lengths)
    real_BS = torch.arange(length) < torch.tensor(case.lengths)[:, None]
    shapes = [
        (batch, heads, length, dim)
        for heads, dim in zip(
            (case.heads[0], *case.heads[1:] * 2), (case.head_dims[0], *case.head_dims), strict=True
        )
    ]
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    for tensor in tensors:
        tensor.masked_fill_(~real_BS[:, None, :, None], 1e4)
    gradient = torch.randn(batch, case.heads[0], length, case.head_dims[1], generator=rng, dtype=torch.float64)
    return tensors, gradient * real_BS[:, None, :, None], real_BS


def _mask(case: Case, real_BS: Tensor) -> Tensor | None:
    """The mask of the unsharded call, ``[.., 1 or S, S]``; it hides the pads wherever it can."""
    rng = torch.Generator().manual_seed(case.seed + 1)
    batch, length = real_BS.shape
    keys = real_BS[:, None, None, :]
    if case.mask in ("none", "causal"):
        return None
    if case.mask in ("key_bool", "full_key"):
        return keys
    hidden = torch.zeros(keys.shape, dtype=torch.float64).masked_fill(~keys, torch.finfo(torch.float64).min)
    if case.mask == "key_float":
        return hidden + torch.randn(batch, 1, 1, length, generator=rng, dtype=torch.float64)
    if case.mask == "key_heads":
        return hidden + torch.randn(1, case.heads[0], 1, length, generator=rng, dtype=torch.float64)
    if case.mask == "full_bool":
        # Each token also sees itself, so that no row is empty.
        window = (torch.rand(length, length, generator=rng) < 0.5) | torch.eye(length, dtype=torch.bool)
        return window & keys | torch.eye(length, dtype=torch.bool)
    return hidden + torch.randn(1, case.heads[0], length, length, generator=rng, dtype=torch.float64)


def _local_mask(case: Case, mask: Tensor | None, group: SPGroup) -> Tensor | None:
    if mask is None or not case.mask.startswith("key"):
        return mask
    shard = mask.shape[-1] // group.size
    return mask.narrow(-1, group.rank * shard, shard)


def _expected(case: Case, tensors: list[Tensor], gradient: Tensor, mask: Tensor | None) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=case.mask == "causal",
        enable_gqa=case.heads[0] != case.heads[1],
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def _difference(case: Case, group: SPGroup) -> tuple[float, list[str]]:
    """Largest difference of output and gradients on the real tokens of this shard, relative to the largest one."""
    tensors, gradient, real_BS = _tensors(case, group.size)
    if case.mask == "none":
        tensors = [tensor.masked_fill(~real_BS[:, None, :, None], 0.5) for tensor in tensors]
    mask = _mask(case, real_BS)
    expected = _expected(case, tensors, gradient, mask)
    shard = real_BS.shape[1] // group.size
    here = slice(group.rank * shard, (group.rank + 1) * shard)
    leaves = [tensor[:, :, here].clone().requires_grad_() for tensor in tensors]
    shapes = tuple((n,) for n in case.lengths)
    context = MicroBatchContext(group=group, shapes=shapes, padded_shape=(real_BS.shape[1],))
    with activate(context):
        output = attention(
            *leaves,
            attn_mask=_local_mask(case, mask, group),
            is_causal=case.mask == "causal",
            enable_gqa=case.heads[0] != case.heads[1],
        )
        found = [output.detach(), *torch.autograd.grad(output, leaves, gradient[:, :, here])]
    real = real_BS[:, None, here, None]
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(a).all()
        scale = max(1.0, float((b * real_BS[:, None, :, None]).abs().max()))
        worst = max(worst, float(((a - b[:, :, here]) * real).abs().max()) / scale)
    if context.masks_differ is not None:
        assert not context.masks_differ, f"false alarm in {case}"
    return worst, context.failures


def _run_cases(cases: list[Case]) -> int:
    exact = 0
    for group in groups_of_this_rank():
        for case in cases:
            worst, failures = _difference(case, group)
            if group.size in legal_sp_sizes(group.size, *case.heads):
                assert not failures, (case, failures)
                assert worst <= 1e-12, (case, group, worst)
                exact += 1
            else:
                assert f"{case.heads[0]} heads" in failures[0]
                assert f"p = {group.size}" in failures[0]
    return exact


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_equals_one_process_or_is_refused_by_name(pool: Pool, world_size: int) -> None:
    """Covers deepspeedai/DeepSpeed#7384 (uneven lengths), deepspeedai/DeepSpeed#6392 (7 heads on 4 ranks),
    PrimeIntellect-ai/prime-rl#3042 (fewer key/value heads than ranks), NVIDIA/Megatron-LM#1464 (gradients),
    huggingface/diffusers#13278 (padding masks), vllm-project/vllm-omni#672 (pads filled with 1e4),
    huggingface/diffusers#13319 (the backward), deepspeedai/DeepSpeed#7672 (every group of every rank).
    """
    exact = pool.run(_run_cases, world_size, _cases(120, seed=world_size), timeout=120)
    # The group of one rank alone gives 120; every rank must have met heads that its wider groups can share.
    assert min(exact) >= (120 if world_size == 1 else 130)
