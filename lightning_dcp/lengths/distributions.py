"""The length distributions of the paper's experiments (Appendix A), and one with the long tail of Panda-70M.

The paper shows its three data sets as pictures and defines which lengths dominate by computational cost, not by
count. So here each is written down as what it is defined by: the share of the compute that falls into each octave of
lengths. How many samples that makes follows from the cost of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray

DISTRIBUTIONS = ("short", "balanced", "long", "panda")
"""Names that :func:`distribution` knows."""

COMPUTE_SHARES: dict[str, tuple[int, ...]] = {
    "short": (100, 220, 260, 180, 100, 60, 40, 30, 10),
    "balanced": (1, 1, 1, 1, 1, 1, 1, 1, 1),
    "long": (5, 2, 1, 1, 3, 8, 30, 200, 750),
}
"""Parts of the compute in the octaves 512 to 1,023 tokens, 1,024 to 2,047, ..., 131,072 to 262,143."""

SHORTEST = 512
PATCHES_PER_FRAME = 256
"""A frame of 256 x 256 pixels in patches of 16 x 16 (an 8 x 8 encoder and 2 x 2 patches: DiT, arXiv:2212.09748)."""

# Panda-70M, arXiv:2402.19479. Its table of data sets: 8.5 s on average. The parameters it was collected with, in its
# repository (splitting/event_stitching.py): clips of 2.5 to 60 s, of which a tenth is cut off at each end.
_FRAMES_PER_SECOND, _SHORTEST_CLIP, _MEAN_CLIP, _LONGEST_CLIP = 24, 2.0, 8.5, 48.0

# Transformer-1D of Table 1 with the feed-forward and the vocabulary of `models/presets.py`.
_LAYERS, _HIDDEN, _VOCABULARY = 42, 3072, 50_257
_PIECES_PER_OCTAVE = 16


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A distribution that is even on each of many pieces.

    Attributes:
        ends: share of the samples up to the end of each piece, in 2**-32, uint64 ``[m]``.
        first: first value of each piece, uint64 ``[m]``.
        width: number of values in it, uint64 ``[m]``.
        unit: tokens of a value.
    """

    ends: NDArray[np.uint64]
    first: NDArray[np.uint64]
    width: NDArray[np.uint64]
    unit: int


def distribution(name: str, count: int, seed: int = 0) -> IntArray:
    """Lengths in tokens of ``count`` samples, int64 ``[count]``, in no order.

    The first lengths of a longer draw are those of a shorter one. Equal on every machine and with every version of
    NumPy: raw bits of a counter-based generator, and integers from there on.

    Args:
        name: one of :data:`DISTRIBUTIONS`. ``short``, ``balanced`` and ``long`` reach from 512 to 262,143 tokens;
            in ``short`` three quarters of the compute of Transformer-1D are in samples below 8,192 tokens, in ``long``
            95 % are in those from 65,536 up, a hundred times what the far more numerous short ones take, and in
            ``balanced`` each octave takes the same. ``panda``: clips of 2 to 48 s, 8.5 s on average, of 24 frames of
            256 patches a second, 12,288 to 294,912 tokens. Range and mean are published; in between the number of
            clips falls geometrically, which adds nothing else (the distribution of largest entropy).
        count: number of samples, from 1.
        seed: from 0.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"no distribution is named {name!r}; allowed are {', '.join(DISTRIBUTIONS)}")
    if type(count) is not int or type(seed) is not int or count < 1 or seed < 0:
        raise ValueError(
            f"count is {count!r} and seed is {seed!r}; allowed are integers, count from 1, seed from 0"
        )
    pieces = _panda() if name == "panda" else _octaves(COMPUTE_SHARES[name])
    entropy = [seed, DISTRIBUTIONS.index(name)]
    bits = np.asarray(np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count), dtype=np.uint64)
    half = np.uint64(32)
    piece = np.searchsorted(pieces.ends, bits >> half, side="right")
    low = bits & np.uint64(2**32 - 1)
    value = pieces.first[piece] + (low * pieces.width[piece] >> half)
    return np.asarray(value.astype(np.int64) * pieces.unit)


def training_flops(lengths: IntArray) -> NDArray[np.float64]:
    """Operations of one forward and backward of Transformer-1D (Table 1) for samples of these lengths.

    Matrix products grow with the length, causal attention with its square; both are equal at 38,000 tokens.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    per_token = 12 * _HIDDEN * _HIDDEN * _LAYERS + _VOCABULARY * _HIDDEN
    return np.asarray(3 * (2 * per_token * tokens + 2 * _LAYERS * _HIDDEN * tokens**2))


@cache
def _octaves(shares: tuple[int, ...]) -> _Pieces:
    """Pieces of equal compute within each octave's share."""
    first, width, weight = [], [], []
    for octave, share in enumerate(shares):
        low = SHORTEST << octave
        step = low // _PIECES_PER_OCTAVE
        starts = range(low, 2 * low, step)
        # Even over the logarithm of the length within an octave: compute in proportion to step / middle.
        parts = [2**64 // (start + step // 2) for start in starts]
        for start, part in zip(starts, parts, strict=True):
            first.append(start)
            width.append(step)
            weight.append(2**80 * share * part // sum(parts) // _cost(start + step // 2))
    return _Pieces(_shares(weight), np.array(first, np.uint64), np.array(width, np.uint64), 1)


def _cost(tokens: int) -> int:
    """Compute of a sample up to a factor, as :func:`training_flops`, in integers."""
    return tokens * (12 * _HIDDEN * _LAYERS + _VOCABULARY + _LAYERS * tokens)


@cache
def _panda() -> _Pieces:
    shortest, longest = (round(_FRAMES_PER_SECOND * s) for s in (_SHORTEST_CLIP, _LONGEST_CLIP))
    mean = round(_FRAMES_PER_SECOND * (_MEAN_CLIP - _SHORTEST_CLIP))
    frames = np.arange(shortest, longest + 1, dtype=np.uint64)
    weights = list(accumulate(range(len(frames) - 1), lambda w, _: w * mean // (mean + 1), initial=2**64))
    return _Pieces(_shares(weights), frames, np.ones_like(frames), PATCHES_PER_FRAME)


def _shares(weights: list[int]) -> NDArray[np.uint64]:
    total = sum(weights)
    return np.array([2**32 * part // total for part in accumulate(weights)], dtype=np.uint64)
