"""The parts that both transformers are made of: rotary positions, attention, feed-forward, pre-norm layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each ``[B, S, D / 2]`` in float32."""


def rotary(position_ids_BS: torch.Tensor, head_dim: int, base: float = 10_000.0) -> Rotary:
    """Angles of rotary position embedding for given, global positions.

    They come from the position ids and never from the length of the input, so a shard of a sequence gets the
    angles of its own place.

    Args:
        position_ids_BS: integer positions, any values.
        head_dim: ``D``, even.
        base: the slowest angle turns once in about ``2 pi * base`` positions.
    """
    steps_E = torch.arange(0, head_dim, 2, device=position_ids_BS.device, dtype=torch.float32) / head_dim
    angles_BSE = position_ids_BS[..., None].float() * base**-steps_E
    return angles_BSE.cos(), angles_BSE.sin()


def rotate(x_BSHD: torch.Tensor, angles: Rotary) -> torch.Tensor:
    """Turn each pair ``(x[i], x[i + D / 2])`` by its angle; computed in float32 or wider, returned as x is."""
    cos_BSE, sin_BSE = angles
    wide = torch.promote_types(x_BSHD.dtype, torch.float32)
    cos_BSXE, sin_BSXE = cos_BSE[..., None, :].to(wide), sin_BSE[..., None, :].to(wide)
    left, right = x_BSHD.to(wide).chunk(2, dim=-1)
    turned = (left * cos_BSXE - right * sin_BSXE, right * cos_BSXE + left * sin_BSXE)
    return torch.cat(turned, dim=-1).to(x_BSHD.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention with optional grouped key/value heads.

    It calls ``torch.nn.functional.scaled_dot_product_attention`` by its full name at call time and knows nothing
    about sequence parallelism: that one call is where the strategy exchanges the shards.

    Args:
        hidden_size: width ``C``.
        num_heads: query heads ``H``; they divide ``C``.
        num_kv_heads: key/value heads; they divide ``H``.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(hidden_size, num_heads, kv_heads) < 1 or hidden_size % num_heads or num_heads % kv_heads:
            raise ValueError(
                f"hidden size {hidden_size}, {num_heads} heads, {kv_heads} key/value heads: "
                "the heads must divide the hidden size, the key/value heads the heads"
            )
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_BSC: torch.Tensor,
        angles: Rotary | None = None,
        key_mask_BXXS: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            hidden_BSC: input; ``S`` is the length of the shard under sequence parallelism.
            angles: rotary angles of the same ``[B, S]``; ``None`` leaves queries and keys unturned.
            key_mask_BXXS: ``[B, 1, 1, S]`` bool, True = may be attended to.
            is_causal: a token sees itself and earlier tokens.
        """
        query_BSHD = self.query(hidden_BSC).unflatten(-1, (self.num_heads, self.head_dim))
        key_BSGD = self.key(hidden_BSC).unflatten(-1, (self.num_kv_heads, self.head_dim))
        value_BSGD = self.value(hidden_BSC).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if angles is not None:
            query_BSHD, key_BSGD = rotate(query_BSHD, angles), rotate(key_BSGD, angles)
        mixed_BHSD = F.scaled_dot_product_attention(
            query_BSHD.transpose(1, 2),
            key_BSGD.transpose(1, 2),
            value_BSGD.transpose(1, 2),
            attn_mask=key_mask_BXXS,
            is_causal=is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        output_BSC: torch.Tensor = self.output(mixed_BHSD.transpose(1, 2).flatten(2))
        return output_BSC


class FeedForward(nn.Module):
    """Two-layer feed-forward with GELU, or the gated form with three matrices (SwiGLU) where ``gated``."""

    def __init__(self, hidden_size: int, inner_size: int, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, inner_size, bias=False)
        self.gate = nn.Linear(hidden_size, inner_size, bias=False) if gated else None
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, hidden_BSC: torch.Tensor) -> torch.Tensor:
        """Transform each token by itself."""
        up_BSF = self.up(hidden_BSC)
        inner_BSF = F.gelu(up_BSF) if self.gate is None else F.silu(self.gate(hidden_BSC)) * up_BSF
        output_BSC: torch.Tensor = self.down(inner_BSF)
        return output_BSC


class TransformerLayer(nn.Module):
    """Pre-norm layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        hidden_size: width ``C``.
        num_heads: query heads.
        num_kv_heads: key/value heads, ``None`` for as many as query heads.
        gated: gated feed-forward.
        dropout: probability of zeroing an element of each branch before it is added.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        gated: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads, num_kv_heads)
        self.feed_forward_norm = nn.LayerNorm(hidden_size)
        self.feed_forward = FeedForward(hidden_size, 4 * hidden_size, gated)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden_BSC: torch.Tensor,
        angles: Rotary | None = None,
        key_mask_BXXS: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """One layer; arguments as in :meth:`SelfAttention.forward`."""
        mixed_BSC = self.attention(self.attention_norm(hidden_BSC), angles, key_mask_BXXS, is_causal)
        hidden_BSC = hidden_BSC + self.dropout(mixed_BSC)
        changed_BSC = self.feed_forward(self.feed_forward_norm(hidden_BSC))
        return hidden_BSC.add(self.dropout(changed_BSC))


def initialize(module: nn.Module, num_residual_branches: int) -> None:
    """Normal weights of scale 0.02; the last matrix of each residual branch smaller by the root of their number.

    Without the second rule the variance of the residual stream grows with the depth.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            last = name.endswith(("attention.output", "feed_forward.down"))
            nn.init.normal_(child.weight, std=0.02 / (num_residual_branches**0.5 if last else 1.0))
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)
