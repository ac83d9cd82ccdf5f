"""What a layer of the paper's two models costs on the virtual cluster: operations, traffic, exchanges, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.virtual import hardware as hw

_BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A repeated layer of one family (`models/layers.py` at the size of Table 1).

    Attributes:
        hidden: width ``C``; the feed-forward is ``4 C`` wide.
        heads: attention heads.
        gated: feed-forward with three matrices instead of two.
        causal: a token attends to earlier ones only.
        exchanged: under sequence parallelism this attention runs along the axis that is cut, between two all-to-alls
            (Ulysses); the other attention of a 2-D model has its sequences whole.
        swapped: the layer first copies its input into the order of its axis.
    """

    hidden: int
    heads: int
    gated: bool
    causal: bool
    exchanged: bool
    swapped: bool

    @property
    def matrix_parameters(self) -> int:
        """Weights in matrices, ``12 C^2`` or gated ``16 C^2``."""
        return (16 if self.gated else 12) * self.hidden**2

    @property
    def parameters(self) -> int:
        """All weights: the matrices and two norms."""
        return self.matrix_parameters + 4 * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one rank of a group computes in a layer.

    Attributes:
        tokens: its tokens, ``b s / p``.
        length: tokens of each sequence that is attended along.
        sp_size: ``p``.
    """

    tokens: float
    length: float
    sp_size: int


def forward_seconds(layer: Layer, load: Load) -> float:
    """Forward, ``t_f``."""
    products = hw.product_seconds(2 * layer.matrix_parameters * load.tokens, _forward_inner(layer))
    return (
        products
        + _attention(layer, load, 1.0, hw.ATTENTION_CAUSAL_FORWARD if layer.causal else hw.ATTENTION_FORWARD)
        + hw.traffic_seconds(_traffic(layer) * load.tokens)
        + _exchange(layer, load)
        + _kernels(layer) * hw.LAUNCH_SECONDS
    )


def backward_seconds(layer: Layer, load: Load) -> float:
    """Backward, ``t_b``: each product twice, attention 2.5 times (FlashAttention recomputes its scores).

    At the end the gradients are added to those of the step in float32: 10 bytes moved per weight.
    """
    width = 13 if layer.gated else 9
    # Gradients of inputs sum over the outputs; those of weights split their long sum, and fill like the forward.
    inner = width * layer.hidden + _forward_inner(layer)
    products = hw.product_seconds(4 * layer.matrix_parameters * load.tokens, inner)
    tensors = 11 if layer.gated else 10
    return (
        products
        + _attention(layer, load, 2.5, hw.ATTENTION_CAUSAL_BACKWARD if layer.causal else hw.ATTENTION_BACKWARD)
        + hw.traffic_seconds(2 * _traffic(layer) * load.tokens + 10 * layer.parameters)
        + _exchange(layer, load)
        + (2 * _kernels(layer) + tensors) * hw.LAUNCH_SECONDS
    )


def recompute_seconds(layer: Layer, load: Load) -> float:
    """What recomputing adds, ``t_r``: the forward up to the input of its last product.

    Checkpointing without reentrance stops there, since nothing later is needed (the strategy uses that kind).
    """
    last = hw.product_seconds(8 * layer.hidden**2 * load.tokens, 4 * layer.hidden)
    added = hw.traffic_seconds(6 * layer.hidden * load.tokens)
    return forward_seconds(layer, load) - last - added - 2 * hw.LAUNCH_SECONDS


def activation_bytes(layer: Layer, tokens: float) -> float:
    """Bytes between forward and backward, ``m``.

    Korthikanti et al. (arXiv:2205.05198) count 34 bytes per token and ``C`` for a layer whose attention scores are
    not kept: norms 4, attention 11, feed-forward 19. Ours have no dropout, so two masks less; gated, the feed-forward
    keeps 34 (its input, two products, the activated one and their product) instead of 18.
    """
    return (48 if layer.gated else 32) * layer.hidden * tokens


def input_bytes(layer: Layer, tokens: float) -> float:
    """Bytes of a layer's input, ``m_inp``."""
    return _BF16 * layer.hidden * tokens


def backward_bytes(layer: Layer, tokens: float) -> float:
    """Largest temporary of a layer's backward: gradients of the wide tensors and of the residual."""
    return (26 if layer.gated else 18) * layer.hidden * tokens


def _forward_inner(layer: Layer) -> float:
    """Sum of the inner lengths: query, key, value, output, up (and gate) ``C`` each, down ``4 C``."""
    return (10 if layer.gated else 9) * layer.hidden


def _traffic(layer: Layer) -> float:
    """Bytes that the element-wise kernels of a forward move per token.

    Two norms 8 C, rotary 8 C, two residual sums 12 C, GELU 16 C; gated: SiLU 16 C and the product 24 C; a swap 4 C.
    """
    return ((68 if layer.gated else 44) + (4 if layer.swapped else 0)) * layer.hidden


def _kernels(layer: Layer) -> int:
    """Kernels of a forward."""
    return (16 if layer.gated else 14) + (1 if layer.swapped else 0)


def _attention(layer: Layer, load: Load, factor: float, rate: hw.AttentionRate) -> float:
    share = factor * (0.5 if layer.causal else 1.0)
    head = layer.hidden // layer.heads
    # The kernels exist for head dimensions in steps of 32: 72 runs as 96.
    padded = -(-head // 32) * 32 / head
    flops = 4 * layer.hidden * load.tokens * load.length * share * padded
    return hw.attention_seconds(flops, load.length, 4 * head * padded * load.length * share, rate)


def _exchange(layer: Layer, load: Load) -> float:
    """All-to-all of query, key and value together and of the output, each with a copy before and one after."""
    if load.sp_size == 1 or not layer.exchanged:
        return 0.0
    held = _BF16 * layer.hidden * load.tokens
    copies = hw.traffic_seconds(4 * 4 * held) + 8 * hw.LAUNCH_SECONDS
    return hw.exchange_seconds(3 * held, load.sp_size) + hw.exchange_seconds(held, load.sp_size) + copies
