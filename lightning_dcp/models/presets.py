"""Named sizes: the two models of the paper's Table 1 and small ones that train on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dcp.models.transformer_1d import Transformer1D, Transformer1DConfig
from lightning_dcp.models.transformer_2d import Transformer2D, Transformer2DConfig

PRESETS: dict[str, Transformer1DConfig | Transformer2DConfig] = {
    # Table 1 gives layers, width and heads. Its 5 B follow with the usual feed-forward of width 4 C and a
    # vocabulary of GPT-2's size; the vocabulary is not in the paper.
    "transformer-1d": Transformer1DConfig(vocab_size=50_257, num_layers=42, hidden_size=3072, num_heads=48),
    # Table 1's 1.2 B follow with 28 spatial and 28 temporal layers and a gated feed-forward of width 4 C; neither
    # the feed-forward nor the patch size is in the paper. 16 features: a 2 x 2 patch of a latent of 4 channels.
    "transformer-2d": Transformer2DConfig(in_size=16, out_size=16, num_layers=28, hidden_size=1152, num_heads=16),
    "bytes-1d": Transformer1DConfig(vocab_size=256, num_layers=4, hidden_size=96, num_heads=4),
    "tiny-1d": Transformer1DConfig(vocab_size=64, num_layers=3, hidden_size=24, num_heads=6),
    "tiny-2d": Transformer2DConfig(in_size=5, out_size=5, num_layers=2, hidden_size=24, num_heads=6),
}
"""Configurations by name.

``transformer-1d`` has 5.07 B parameters, ``transformer-2d`` 1.19 B, ``bytes-1d`` 0.5 M and a token per byte.
``tiny-1d`` and ``tiny-2d`` are for tests: their 6 heads allow the SP sizes 1, 2, 3 and 6.
"""


def build(name: str, **changes: Any) -> Transformer1D | Transformer2D:
    """A model of a named size, with random weights on torch's current default device.

    Args:
        name: a key of :data:`PRESETS`.
        **changes: fields of the configuration to replace, for example ``causal=False``.

    Raises:
        ValueError: the name is not known, or a changed value is not allowed.
        TypeError: a changed field does not exist.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is named {name!r}; allowed are {', '.join(sorted(PRESETS))}")
    config = replace(PRESETS[name], **changes)
    if isinstance(config, Transformer1DConfig):
        return Transformer1D(config)
    return Transformer2D(config)
