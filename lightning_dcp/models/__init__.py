"""The two models of the paper, as plain modules that know nothing about the strategy."""

from lightning_dcp.models.presets import PRESETS, build
from lightning_dcp.models.transformer_1d import Transformer1D, Transformer1DConfig
from lightning_dcp.models.transformer_2d import Transformer2D, Transformer2DConfig

__all__ = [
    "PRESETS",
    "Transformer1D",
    "Transformer1DConfig",
    "Transformer2D",
    "Transformer2DConfig",
    "build",
]
