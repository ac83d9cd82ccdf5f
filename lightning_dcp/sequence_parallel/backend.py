"""Attention on one rank: which kernel computes it, decided in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

SDPA = Callable[..., Tensor]

EXCHANGE_ORIGINAL = "_lightning_dcp_exchange_original"
"""Attribute of our exchanging ``scaled_dot_product_attention``: the function that it replaced."""

RECORDER_ORIGINAL = "_lightning_dcp_recorder_original"
"""Attribute of our recording ``scaled_dot_product_attention``: the function that it replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Settings of one call, as in ``torch.nn.functional.scaled_dot_product_attention``.

    Attributes:
        sdpa: computes the attention on one rank, where no other kernel is chosen.
        dropout_p: probability of dropping an attention weight.
        is_causal: token ``i`` sees tokens ``0 .. i``.
        scale: factor of the scores; ``None`` means ``1 / sqrt(D)``.
        enable_gqa: key and value may have fewer heads than the query.
    """

    sdpa: SDPA
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The kernel of one attention call and the reason for it."""

    name: Literal["flash-attn", "sdpa"]
    reason: str


def choose_backend(
    query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, attn_mask: Tensor | None, options: AttentionOptions
) -> Backend:
    """Decide between the flash-attn package and torch's own kernels; the only place that does."""
    tensors = (query_BHSD, key_BHSD, value_BHSD)
    refusals = (
        (not query_BHSD.is_cuda, "tensors are not on a CUDA device"),
        (attn_mask is not None, "flash-attn takes no mask beyond causal"),
        (any(t.dim() != 4 for t in tensors), "flash-attn wants [B, H, S, D]"),
        (query_BHSD.dtype not in (torch.float16, torch.bfloat16), f"flash-attn has no {query_BHSD.dtype}"),
        (len({t.dtype for t in tensors}) > 1, "dtypes differ"),
        (len({t.shape[-1] for t in tensors}) > 1, "head sizes of query, key and value differ"),
        (query_BHSD.shape[-1] % 8 != 0 or query_BHSD.shape[-1] > 256, "head size is no multiple of 8 up to 256"),
        (query_BHSD.shape[-2] != key_BHSD.shape[-2], "query and key lengths differ"),
        (not inspect.isbuiltin(options.sdpa), "scaled_dot_product_attention was replaced by other code"),
    )
    for refused, reason in refusals:
        if refused:
            return Backend(name="sdpa", reason=reason)
    if _flash_attn() is None:
        return Backend(name="sdpa", reason="flash-attn is not installed")
    return Backend(name="flash-attn", reason="half precision without a mask")


def attend(
    query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, attn_mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attention over the tokens that this rank holds; never exchanges anything.

    Returns:
        ``[B, H, S, Dv]``.
    """
    if choose_backend(query_BHSD, key_BHSD, value_BHSD, attn_mask, options).name == "flash-attn":
        return _attend_flash(query_BHSD, key_BHSD, value_BHSD, options)
    return options.sdpa(
        query_BHSD,
        key_BHSD,
        value_BHSD,
        attn_mask=attn_mask,
        dropout_p=options.dropout_p,
        is_causal=options.is_causal,
        scale=options.scale,
        enable_gqa=options.enable_gqa,
    )


def exposed_sdpa(*, recorded: bool = True) -> SDPA:
    """What ``torch.nn.functional.scaled_dot_product_attention`` is without our exchange around it.

    A replacement by the user's own code (another kernel, a counter) is kept, so that every ``p`` uses it.
    """
    sdpa: SDPA = functional.scaled_dot_product_attention
    sdpa = getattr(sdpa, EXCHANGE_ORIGINAL, sdpa)
    return sdpa if recorded else getattr(sdpa, RECORDER_ORIGINAL, sdpa)


@cache
def _flash_attn() -> Callable[..., Any] | None:
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    function: Callable[..., Any] = flash_attn_func
    return function


def _attend_flash(query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, options: AttentionOptions) -> Tensor:
    flash_attn = _flash_attn()
    assert flash_attn is not None
    output_BSHD: Tensor = flash_attn(
        *(t.transpose(1, 2) for t in (query_BHSD, key_BHSD, value_BHSD)),
        dropout_p=options.dropout_p,
        softmax_scale=options.scale,
        causal=options.is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output_BSHD.transpose(1, 2)
