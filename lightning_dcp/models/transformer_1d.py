"""Transformer-1D of the paper (Table 1): a language model over one axis of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_dcp.models.layers import TransformerLayer, initialize, rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer1DConfig:
    """Size and kind of a :class:`Transformer1D`.

    Attributes:
        vocab_size: number of different tokens.
        num_layers: repeated layers ``L``.
        hidden_size: width ``C``.
        num_heads: query heads; a sequence-parallel size must divide them.
        num_kv_heads: key/value heads, ``None`` for as many as query heads.
        causal: a token sees itself and earlier ones; False for attention over the whole sequence.
        positions: rotary angles (any length), or learned vectors for positions below ``max_positions``.
        max_positions: number of learned vectors; not used by rotary positions.
        dropout: in each residual branch.

    Raises:
        ValueError: a size is below one, or the dropout is not in ``[0, 1)``.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    causal: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    max_positions: int = 4096
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.num_layers, self.hidden_size, self.num_heads, self.max_positions)
        if min(sizes) < 1 or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"{self}: every size must be at least 1 and the dropout in [0, 1)")
        if self.positions not in ("rotary", "learned"):
            raise ValueError(f"positions is {self.positions!r}; allowed are 'rotary' and 'learned'")
        if self.positions == "rotary" and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"heads of {self.hidden_size // self.num_heads} elements cannot be turned in pairs; choose a "
                "hidden size and a number of heads with an even quotient, or positions='learned'"
            )


class Transformer1D(nn.Module):
    """Tokens to logits, pre-norm, separate output matrix.

    The repeated layers stand in :attr:`layers`.
    """

    def __init__(self, config: Transformer1DConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_positions, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(
            TransformerLayer(config.hidden_size, config.num_heads, config.num_kv_heads, dropout=config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialize(self, 2 * config.num_layers)

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        attention_mask_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[B, S, vocab_size]`` of the given tokens.

        Args:
            input_ids_BS: tokens; under sequence parallelism this rank's shard of them.
            position_ids_BS: place of each token in the whole sequence.
            attention_mask_BS: bool, True = real token. Only attention over the whole sequence looks at it: padding
                stands at the end, where a causal token never sees it.
        """
        hidden_BSC = self.embedding(input_ids_BS)
        angles, key_mask_BXXS = None, None
        if self.position_embedding is None:
            angles = rotary(position_ids_BS, self.config.hidden_size // self.config.num_heads)
        else:
            hidden_BSC = hidden_BSC + self.position_embedding(position_ids_BS)
        if attention_mask_BS is not None and not self.config.causal:
            key_mask_BXXS = attention_mask_BS[:, None, None, :]
        for layer in self.layers:
            hidden_BSC = layer(hidden_BSC, angles, key_mask_BXXS, self.config.causal)
        logits_BSV: torch.Tensor = self.head(self.norm(hidden_BSC))
        return logits_BSV
