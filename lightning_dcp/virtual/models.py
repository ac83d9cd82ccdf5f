"""The paper's two models (Table 1) as families of layers with what surrounds them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.plan import Shape
from lightning_dcp.virtual import hardware as hw
from lightning_dcp.virtual.layers import Layer

_REDUCE_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at once by default."""
_OUTER_KERNELS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of Table 1.

    Attributes:
        families: the repeated layers, one entry per family.
        num_layers: layers of each family.
        axes: axes of a sample: tokens, or frames and patches. Sequence parallelism cuts the first.
        inputs: width of what goes in (a vocabulary for tokens).
        outputs: width of what comes out.
        embedded: whether the input is looked up in a table; else it is multiplied.
    """

    families: tuple[Layer, ...]
    num_layers: tuple[int, ...]
    axes: int
    inputs: int
    outputs: int
    embedded: bool

    @property
    def hidden(self) -> int:
        """Width ``C``."""
        return self.families[0].hidden

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.families[0].heads

    @property
    def outer_parameters(self) -> int:
        """Weights outside the repeated layers: embedding, last norm, output matrix."""
        return (self.inputs + self.outputs + 2) * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        layers = (n * f.parameters for n, f in zip(self.num_layers, self.families, strict=True))
        return sum(layers) + self.outer_parameters

    def lengths(self, shape: Shape) -> tuple[int, ...]:
        """Tokens of a sequence for each family: along the tokens, or along the patches, then along the frames."""
        return (shape[0],) if self.axes == 1 else (shape[1], shape[0])

    def outer_seconds(self, tokens: float) -> float:
        """Embedding, last norm, output matrix and loss of a micro-batch, forward and backward, ``T_C``.

        The loss reads and writes 28 bytes per output (bfloat16 to float32 and back, log-softmax and its gradient).
        """
        inner = 2 * self.hidden + self.outputs
        products = 3 * 2 * self.outputs * self.hidden * tokens
        if not self.embedded:
            inner += 2 * self.inputs + self.hidden
            products += 2 * 2 * self.inputs * self.hidden * tokens
        moved = (28 * self.outputs + 22 * self.hidden) * tokens + 10 * self.outer_parameters
        launches = _OUTER_KERNELS * hw.LAUNCH_SECONDS
        return hw.product_seconds(products, inner) + hw.traffic_seconds(moved) + launches

    def static_bytes(self, world_size: int) -> int:
        """Weights and gradients in bfloat16, the step's gradients in float32, and ZeRO-1's share of 12 bytes.

        That is DeepSpeed's ``BF16_Optimizer``: of every weight its bfloat16 value and gradient and the float32 sum
        are on each rank, and of the master weight and Adam's two moments ``1 / W``.
        """
        return 8 * self.parameters + -(-12 * self.parameters // world_size)

    def sync_seconds(self, world_size: int) -> float:
        """``T_sync``: gradients cast to bfloat16 and reduced, Adam on a ``1 / W`` share, weights gathered."""
        count = self.parameters
        local = hw.traffic_seconds(10 * count + 30 * count / world_size)
        calls = -(-count // _REDUCE_BUCKET)
        return local + 2 * hw.ring_seconds(2 * count, calls, world_size)


def _layer(hidden: int, heads: int, **kind: bool) -> Layer:
    return Layer(hidden=hidden, heads=heads, **kind)


MODELS: dict[str, Model] = {
    "h200-transformer-1d": Model(
        families=(_layer(3072, 48, gated=False, causal=True, exchanged=True, swapped=False),),
        num_layers=(42,),
        axes=1,
        inputs=50_257,
        outputs=50_257,
        embedded=True,
    ),
    "h200-transformer-2d": Model(
        families=(
            _layer(1152, 16, gated=True, causal=False, exchanged=False, swapped=True),
            _layer(1152, 16, gated=True, causal=False, exchanged=True, swapped=True),
        ),
        num_layers=(28, 28),
        axes=2,
        inputs=16,
        outputs=16,
        embedded=False,
    ),
}
