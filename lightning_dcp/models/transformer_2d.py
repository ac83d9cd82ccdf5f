"""Transformer-2D of the paper (Table 1): attention along one axis, then along the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lightning_dcp.models.layers import Rotary, TransformerLayer, initialize, rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer2DConfig:
    """Size of a :class:`Transformer2D`.

    Attributes:
        in_size: features of a patch that go in.
        out_size: features of a patch that come out.
        num_layers: layers of EACH of the two families.
        hidden_size: width ``C``.
        num_heads: heads of both attentions.
        dropout: in each residual branch.

    Raises:
        ValueError: a size is below one, the dropout is not in ``[0, 1)``, or a head has an odd number of elements.
    """

    in_size: int
    out_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.in_size, self.out_size, self.num_layers, self.hidden_size, self.num_heads)
        if min(sizes) < 1 or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"{self}: every size must be at least 1 and the dropout in [0, 1)")
        if (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"heads of {self.hidden_size // self.num_heads} elements cannot be turned in pairs; choose a "
                "hidden size and a number of heads with an even quotient"
            )


class Transformer2D(nn.Module):
    """Patches of frames to patches of frames.

    Each round attends among the patches of a frame (a layer of :attr:`spatial_layers`), then among the frames at
    one patch position (a layer of :attr:`temporal_layers`). Both axes have rotary positions; the feed-forward is
    the gated one. The model is not sharded: it runs with sequence-parallel size 1.
    """

    def __init__(self, config: Transformer2DConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Linear(config.in_size, config.hidden_size)
        self.spatial_layers = self._family()
        self.temporal_layers = self._family()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.out_size)
        initialize(self, 4 * config.num_layers)

    def _family(self) -> nn.ModuleList:
        config = self.config
        return nn.ModuleList(
            TransformerLayer(config.hidden_size, config.num_heads, gated=True, dropout=config.dropout)
            for _ in range(config.num_layers)
        )

    def forward(self, patches_BFPI: torch.Tensor, attention_mask_BFP: torch.Tensor | None = None) -> torch.Tensor:
        """Output ``[B, F, P, out_size]``.

        Args:
            patches_BFPI: ``F`` frames of ``P`` patches with ``in_size`` features each.
            attention_mask_BFP: bool, True = real patch. The real part of a sample is a box that starts at frame 0
                and patch 0: a patch position is masked where no frame has it, a frame where it has no patch, so no
                row of the attention is ever masked as a whole.
        """
        batch, frames, patches, _ = patches_BFPI.shape
        hidden_NPC = self.embedding(patches_BFPI).flatten(0, 1)
        spatial, temporal = self._angles(patches_BFPI.device, frames, patches)
        patch_mask, frame_mask = _axis_masks(attention_mask_BFP)
        for spatial_layer, temporal_layer in zip(self.spatial_layers, self.temporal_layers, strict=True):
            hidden_NPC = spatial_layer(hidden_NPC, spatial, patch_mask)
            hidden_MFC = _swap(hidden_NPC, batch)
            hidden_MFC = temporal_layer(hidden_MFC, temporal, frame_mask)
            hidden_NPC = _swap(hidden_MFC, batch)
        output_NPO: torch.Tensor = self.head(self.norm(hidden_NPC))
        return output_NPO.view(batch, frames, patches, -1)

    def _angles(self, device: torch.device, frames: int, patches: int) -> tuple[Rotary, Rotary]:
        """Angles along the patches and along the frames; one row that broadcasts over the batch."""
        head_dim = self.config.hidden_size // self.config.num_heads
        spatial = rotary(torch.arange(patches, device=device)[None], head_dim)
        temporal = rotary(torch.arange(frames, device=device)[None], head_dim)
        return spatial, temporal


def _swap(hidden_NSC: torch.Tensor, batch: int) -> torch.Tensor:
    """``[B * X, Y, C]`` to ``[B * Y, X, C]``; its own inverse."""
    return hidden_NSC.view(batch, -1, *hidden_NSC.shape[1:]).transpose(1, 2).flatten(0, 1)


def _axis_masks(mask_BFP: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Key masks ``[B * F, 1, 1, P]`` of the spatial and ``[B * P, 1, 1, F]`` of the temporal attention."""
    if mask_BFP is None:
        return None, None
    _, frames, patches = mask_BFP.shape
    patch_mask_BP, frame_mask_BF = mask_BFP.any(dim=1), mask_BFP.any(dim=2)
    return (
        patch_mask_BP.repeat_interleave(frames, dim=0)[:, None, None, :],
        frame_mask_BF.repeat_interleave(patches, dim=0)[:, None, None, :],
    )
