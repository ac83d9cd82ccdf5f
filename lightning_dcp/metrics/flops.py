"""Floating-point operations of samples: a model's own, counted by pairs of tokens where they attend.

Only what a single device would need for the true samples counts: no padding, no recompute, no exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import Shape

FloatArray = NDArray[np.float64]
Kind = Literal["full", "causal"]

BACKWARD = 2
"""A backward computes two products, by the weights and by the inputs, for each one of the forward."""


class AttentionCall(NamedTuple):
    """One call of attention in the forward of one sample.

    Attributes:
        sequences: independent sequences of the call (frames, where each attends within itself).
        queries, keys: their lengths.
        pairs: pairs of a query and a key that may attend, of one sequence.
        flops_per_pair: of all heads, ``2 heads (head_dim + value_dim)``.
    """

    sequences: int
    queries: int
    keys: int
    pairs: int
    flops_per_pair: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was counted in the forward of one sample.

    Attributes:
        shape: the sample's size.
        dense: operations outside of attention.
        calls: the calls of attention, in order.
    """

    shape: Shape
    dense: int
    calls: tuple[AttentionCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A length as it follows from a sample's shape: ``factor * (product of some axes) + plus``."""

    axes: tuple[int, ...] = ()
    factor: int = 1
    plus: int = 0

    def of(self, shapes: IntArray) -> FloatArray:
        """The length for each of the shapes ``[n, axes]``."""
        return np.asarray(self.factor * shapes[:, self.axes].prod(axis=1).astype(np.float64) + self.plus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Calls of attention of one form."""

    sequences: Extent
    queries: Extent
    keys: Extent
    kind: Kind
    flops_per_pair: int

    def of(self, shapes: IntArray) -> FloatArray:
        """Forward operations for each of the shapes ``[n, axes]``."""
        queries, keys = self.queries.of(shapes), self.keys.of(shapes)
        pairs = queries * keys if self.kind == "full" else _causal(queries, keys)
        return self.flops_per_pair * self.sequences.of(shapes) * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Operations of a sample, by its shape.

    Attributes:
        dense: coefficients of 1, tokens and tokens squared, outside of attention.
        attention: the calls of attention.
        exact: whether all samples that were counted are met exactly.
    """

    dense: tuple[float, float, float]
    attention: tuple[Attention, ...]
    exact: bool = True

    def forward(self, shapes: IntArray) -> FloatArray:
        """Operations of the forward of samples of shapes ``[n, axes]``."""
        tokens = shapes.prod(axis=1).astype(np.float64)
        constant, linear, square = self.dense
        flops = constant + tokens * (linear + square * tokens)
        for calls in self.attention:
            flops = flops + calls.of(shapes)
        return np.asarray(flops)

    def training(self, shapes: IntArray) -> float:
        """Operations of forward and backward of all samples together."""
        return (1 + BACKWARD) * float(self.forward(shapes).sum())


def fitted(observations: Sequence[Observation]) -> FlopCount:
    """How operations follow from the shape, from a few samples of different shapes.

    Raises:
        ValueError: a length of attention follows from the sample's axes in no way that is known.
    """
    shapes = [o.shape for o in observations]
    numbers = {len(o.calls) for o in observations}
    if len(numbers) != 1:
        raise ValueError(f"the number of attention calls differs between samples: {sorted(numbers)}")
    calls: Counter[Attention] = Counter()
    for same in zip(*(o.calls for o in observations), strict=True):
        flops = {call.flops_per_pair for call in same}
        if len(flops) != 1:
            raise ValueError(f"heads differ between samples: {sorted(flops)} operations for a pair of tokens")
        form = Attention(
            sequences=_extent([call.sequences for call in same], shapes),
            queries=_extent([call.queries for call in same], shapes),
            keys=_extent([call.keys for call in same], shapes),
            kind=_kind(same),
            flops_per_pair=1,
        )
        calls[form] += flops.pop()
    dense, exact = _dense([prod(shape) for shape in shapes], [o.dense for o in observations], len(shapes[0]))
    attention = tuple(
        Attention(sequences=a.sequences, queries=a.queries, keys=a.keys, kind=a.kind, flops_per_pair=flops)
        for a, flops in calls.items()
    )
    return FlopCount(dense=dense, attention=attention, exact=exact)


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs where query ``i`` sees the keys up to ``i``: ``s (s + 1) / 2`` for equally many."""
    return int(_causal(np.asarray([queries], dtype=np.float64), np.asarray([keys], dtype=np.float64))[0])


def _causal(queries: FloatArray, keys: FloatArray) -> FloatArray:
    both = np.minimum(queries, keys)
    return np.asarray(both * (both + 1) / 2 + (queries - both) * keys)


def _kind(calls: Sequence[AttentionCall]) -> Kind:
    """Causal where all samples have the pairs of a causal mask and not all have every pair."""
    if all(call.pairs == call.queries * call.keys for call in calls):
        return "full"
    return "causal" if all(call.pairs == causal_pairs(call.queries, call.keys) for call in calls) else "full"


def _extent(values: Sequence[int], shapes: Sequence[Shape]) -> Extent:
    """The simplest rule that gives all values."""
    axes = range(len(shapes[0]))
    subsets = [chosen for size in (*axes, len(axes)) for chosen in combinations(axes, size)]
    found = [rule for chosen in subsets for rule in _rules(values, shapes, chosen)]
    if not found:
        raise ValueError(f"attention over {list(values)} in samples of shapes {list(shapes)}")
    return min(found, key=lambda rule: (abs(rule.plus), rule.factor, len(rule.axes)))


def _rules(values: Sequence[int], shapes: Sequence[Shape], axes: tuple[int, ...]) -> Iterator[Extent]:
    products = [prod(shape[axis] for axis in axes) for shape in shapes]
    differences = {value - product for value, product in zip(values, products, strict=True)}
    if len(differences) == 1:
        yield Extent(axes=axes, plus=differences.pop())
    ratios = {Fraction(value, product) for value, product in zip(values, products, strict=True)}
    if len(ratios) == 1 and (ratio := ratios.pop()).denominator == 1 and ratio > 1:
        yield Extent(axes=axes, factor=int(ratio))


def _dense(tokens: Sequence[int], flops: Sequence[int], axes: int) -> tuple[tuple[float, float, float], bool]:
    """The lowest polynomial in the tokens that gives all counts; by the mean of a token where none does.

    A square is what attention costs that is written out as matrix products, along one axis only.
    """
    counted = list(zip(tokens, flops, strict=True))
    points = sorted(dict(counted).items())
    degrees = range(min(len(points), 3 if axes == 1 else 2))
    for coefficients in (_proportional(points[0]), *(_through(points[: degree + 1]) for degree in degrees[1:])):
        if (
            all(sum(c * t**k for k, c in enumerate(coefficients)) == f for t, f in counted)
            and coefficients[2] >= 0
        ):
            return (float(coefficients[0]), float(coefficients[1]), float(coefficients[2])), True
    return (0.0, sum(flops) / sum(tokens), 0.0), False


Coefficients = tuple[Fraction, Fraction, Fraction]


def _proportional(point: tuple[int, int]) -> Coefficients:
    return Fraction(0), Fraction(point[1], point[0]), Fraction(0)


def _through(points: Sequence[tuple[int, int]]) -> Coefficients:
    """The polynomial through two or three points."""
    (t0, f0), (t1, f1) = points[:2]
    first = Fraction(f1 - f0, t1 - t0)
    if len(points) == 2:
        return f0 - first * t0, first, Fraction(0)
    t2, f2 = points[2]
    second = (Fraction(f2 - f1, t2 - t1) - first) / (t2 - t0)
    return f0 - first * t0 + second * t0 * t1, first - second * (t0 + t1), second
