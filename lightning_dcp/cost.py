"""The measured profile and the cost model that the planners ask: Eq. 4 to 6 in integers.

A profile is a table of measurements. The cost model interpolates it linearly in the number of tokens and in
the batch size. All arithmetic is on int64 nanoseconds and bytes, so every rank gets the same answer to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.plan import PlanError, Shape, read_json

IntArray = NDArray[np.int64]
RecomputePolicy = Literal["auto", "none", "full"]

FORMAT = "lightning_dcp.profile"
INFEASIBLE = 2**62
"""Nanoseconds of a setting that no number of recomputed layers makes fit the memory limit."""


class ProfileError(ValueError):
    """A profile is damaged, or was measured for something else; the message names the field that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One probe of two layers of the model (paper 3.5), per rank, maximum over the ranks.

    The five tuples hold one number per family of repeated layers, for ONE layer of it.

    Attributes:
        batch_size: ``b``.
        shape: size of every sample of the probe.
        sp_size: ``p``.
        forward: nanoseconds of a layer's forward, ``t_f``.
        backward: nanoseconds of its backward, ``t_b``.
        recompute: nanoseconds that recomputing it adds to the backward, ``t_r`` (Eq. 5 takes ``t_f``).
        activation_bytes: bytes a layer holds between forward and backward when it is not recomputed, ``m``.
        input_bytes: bytes it holds when it is recomputed, ``m_inp``.
        constant_time: nanoseconds of all that is outside the repeated layers, ``T_C``.
        constant_bytes: bytes at the peak beyond the layers' activations: what embedding, head and loss hold and
            the largest temporary of the backward (the part of ``M_C`` that grows with the tokens).
    """

    batch_size: int
    shape: Shape
    sp_size: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recompute: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    constant_time: int
    constant_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            minimum = 1 if field.name in ("batch_size", "shape", "sp_size") else 0
            if any(type(v) is not int or not minimum <= v < 2**53 for v in values):
                raise ProfileError(f"{field.name} is {value!r}; allowed are integers from {minimum} up to 2**53")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured, and for what.

    Attributes:
        identity: what the numbers depend on (model fingerprint, device, world size, precision, versions).
            A profile is used again only where all of it is equal.
        num_layers: layers per family, ``L``.
        static_bytes: bytes per rank that no micro-batch changes: weights, gradients, optimizer states, buckets.
        measurements: the probes.
    """

    identity: Mapping[str, str]
    num_layers: tuple[int, ...]
    static_bytes: int
    measurements: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        if not self.measurements:
            raise ProfileError("the profile holds no measurement; it needs at least one")
        axes = {len(m.shape) for m in self.measurements}
        if len(axes) != 1:
            raise ProfileError(
                f"the measurements have shapes of {sorted(axes)} axes; all must have the same number"
            )
        for m in self.measurements:
            sizes = {len(v) for v in (m.forward, m.backward, m.recompute, m.activation_bytes, m.input_bytes)}
            if sizes != {len(self.num_layers)}:
                raise ProfileError(
                    f"a measurement has {sorted(sizes)} families of layers, the profile {len(self.num_layers)}"
                )

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest probe; longer samples would have to be extrapolated."""
        return max(prod(m.shape) for m in self.measurements)

    def differing(self, identity: Mapping[str, str]) -> list[str]:
        """Names of the identity fields that differ from ``identity``, as ``name: here / there``."""
        names = sorted({*self.identity, *identity})
        return [
            f"{name}: {self.identity.get(name, '-')} / {identity.get(name, '-')}"
            for name in names
            if self.identity.get(name) != identity.get(name)
        ]

    def to_json(self) -> str:
        """The profile as JSON text; :meth:`from_json` gives an equal profile back."""
        content = {
            "format": FORMAT,
            "identity": dict(self.identity),
            "num_layers": self.num_layers,
            "static_bytes": self.static_bytes,
            "measurements": [asdict(m) for m in self.measurements],
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile that :meth:`to_json` wrote.

        Raises:
            ProfileError: no JSON, another format, or a value of the wrong type or out of range.
        """
        try:
            content = read_json(text, FORMAT, ("identity", "num_layers", "static_bytes", "measurements"))
            identity, layers = content["identity"], content["num_layers"]
            if not isinstance(identity, dict) or not all(isinstance(v, str) for v in identity.values()):
                raise ProfileError(f"identity is {identity!r}; it must map names to strings")
            if not isinstance(layers, list) or any(type(n) is not int or n < 1 for n in layers):
                raise ProfileError(f"num_layers is {layers!r}; it must be a list of integers from 1")
            if type(content["static_bytes"]) is not int or content["static_bytes"] < 0:
                raise ProfileError(f"static_bytes is {content['static_bytes']!r}; it must be an integer from 0")
            rows = tuple(_measurement(row) for row in content["measurements"])
        except (PlanError, TypeError) as error:
            raise ProfileError(f"this is no profile that we wrote: {error}") from error
        return cls(
            identity=identity,
            num_layers=tuple(layers),
            static_bytes=content["static_bytes"],
            measurements=rows,
        )


def _measurement(row: Any) -> Measurement:
    return Measurement(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Best settings of many candidates at once; all arrays have the broadcast shape of the question.

    Attributes:
        nanoseconds: time with the fewest recomputed layers that fit (Eq. 4), or :data:`INFEASIBLE`.
        bytes: memory with them (Eq. 6).
        recompute: the counts ``r``, shape ``[..., families]``.
    """

    nanoseconds: IntArray
    bytes: IntArray
    recompute: IntArray


class CostModel:
    """Predicted time and memory of a micro-batch, per rank, from a profile.

    Times and bytes never fall with the length of a sample or with the batch size (the lower bound of a plan
    stands on it): where a measurement says otherwise, it is raised to its neighbour's value.

    Args:
        profile: the measurements.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers
        self.sp_sizes = tuple(sorted({m.sp_size for m in profile.measurements}))
        self._grids = {p: _Grid.build(profile, p) for p in self.sp_sizes}

    def nanoseconds(self, batch_size: int, shape: Shape, sp_size: int, recompute: tuple[int, ...]) -> int:
        """Time ``T`` of one micro-batch (Eq. 4), ``recompute`` layers of each family recomputed (Eq. 5)."""
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(prod(shape)))
        return int(terms.time(self._counts(recompute)))

    def bytes(self, batch_size: int, shape: Shape, sp_size: int, recompute: tuple[int, ...]) -> int:
        """Peak memory ``M`` of one micro-batch (Eq. 6)."""
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(prod(shape)))
        return int(terms.memory(self._counts(recompute), self.profile.static_bytes))

    def settings(
        self,
        sp_size: int,
        batch_size: IntArray,
        tokens: IntArray,
        memory_bytes: int,
        policy: RecomputePolicy = "auto",
    ) -> Settings:
        """Fewest recomputed layers that fit, with their time and memory, for arrays of candidates.

        Algorithm 1 as meant: the smallest ``r`` within the memory, compared by time. With several families,
        the layers whose recompute costs least time per byte saved are taken first.

        Args:
            sp_size: ``p``.
            batch_size: samples per micro-batch.
            tokens: padded tokens of each sample; broadcast against ``batch_size``.
            memory_bytes: limit per rank.
            policy: ``"auto"`` searches, ``"none"`` recomputes nothing, ``"full"`` every layer.
        """
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(tokens))
        layers = np.asarray(self.num_layers, dtype=np.int64)
        shape = terms.constant_time.shape
        counts = np.broadcast_to(layers if policy == "full" else 0 * layers, (*shape, len(layers))).copy()
        if policy == "auto":
            counts = terms.fewest_recomputed(layers, memory_bytes - self.profile.static_bytes)
        memory = terms.memory(counts, self.profile.static_bytes)
        time = np.where(memory <= memory_bytes, terms.time(counts), INFEASIBLE)
        return Settings(nanoseconds=time, bytes=memory, recompute=counts)

    def _terms(self, sp_size: int, batch_size: IntArray, tokens: IntArray) -> _Terms:
        if sp_size not in self._grids:
            raise ValueError(f"sequence-parallel size {sp_size} was not profiled; the profile has {self.sp_sizes}")
        values = self._grids[sp_size].interpolate(batch_size, tokens)
        return _Terms.from_stack(values, np.asarray(self.num_layers, dtype=np.int64))

    def _counts(self, recompute: tuple[int, ...]) -> IntArray:
        counts = recompute or (0,) * len(self.num_layers)
        allowed = len(counts) == len(self.num_layers) and all(
            0 <= r <= n for r, n in zip(counts, self.num_layers, strict=True)
        )
        if not allowed:
            raise ValueError(f"recompute is {recompute}; allowed are counts from 0 up to {self.num_layers}")
        return np.asarray(counts, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The quantities of Eq. 4 to 6 for many candidates; per-family arrays end in the family axis."""

    layers: IntArray
    plain_time: IntArray
    recompute_time: IntArray
    activation: IntArray
    layer_input: IntArray
    constant_time: IntArray
    constant_bytes: IntArray

    @classmethod
    def from_stack(cls, values: IntArray, layers: IntArray) -> _Terms:
        count = len(layers)
        families = np.moveaxis(values[: 4 * count].reshape(4, count, *values.shape[1:]), 1, -1)
        return cls(
            layers=layers,
            plain_time=families[0],
            recompute_time=families[1],
            activation=families[2],
            # A recomputed layer never holds more than a plain one, whatever noise says.
            layer_input=np.minimum(families[3], families[2]),
            constant_time=values[-2],
            constant_bytes=values[-1],
        )

    def time(self, counts: IntArray) -> IntArray:
        per_family = self.layers * self.plain_time + counts * self.recompute_time
        return np.asarray(per_family.sum(axis=-1) + self.constant_time)

    def memory(self, counts: IntArray, static_bytes: int) -> IntArray:
        held = (self.layers - counts) * self.activation + counts * self.layer_input
        # The first layers are the recomputed ones, so their recompute runs when later activations are gone;
        # only if no layer is left plain does a whole layer's m come on top (found by running).
        last = np.where((counts == self.layers) & (counts > 0), self.activation, 0)
        return np.asarray(held.sum(axis=-1) + last.max(axis=-1, initial=0) + self.constant_bytes + static_bytes)

    def fewest_recomputed(self, layers: IntArray, room: int) -> IntArray:
        """Counts per family, shape ``[..., families]``; all layers where even that does not fit."""
        counts = np.zeros((*self.constant_time.shape, len(layers)), dtype=np.int64)
        saved = self.activation - self.layer_input
        price = self.recompute_time / np.maximum(saved, 1)
        order = np.argsort(price, axis=-1, kind="stable")
        for position in range(len(layers)):
            family = order[..., position, None]
            missing = self.memory(counts, 0) - room
            gain = np.take_along_axis(saved, family, -1)[..., 0]
            wanted = np.where(missing > 0, -(-missing // np.maximum(gain, 1)), 0)
            limit = np.asarray(layers)[family[..., 0]]
            np.put_along_axis(counts, family, np.minimum(wanted, limit)[..., None], -1)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """All quantities of one sequence-parallel size on the grid (batch size, tokens): ``values[Q, B, S]``."""

    batch_nodes: IntArray
    token_nodes: IntArray
    values: IntArray

    @classmethod
    def build(cls, profile: Profile, sp_size: int) -> _Grid:
        rows = [m for m in profile.measurements if m.sp_size == sp_size]
        # The grid spans the nodes of all sizes: what was too large to measure here is extrapolated.
        token_nodes = np.unique([prod(m.shape) for m in profile.measurements]).astype(np.int64)
        batch_nodes = np.unique([1, *(m.batch_size for m in rows)]).astype(np.int64)
        quantities = 4 * len(profile.num_layers) + 2
        values = np.full((quantities, len(batch_nodes), len(token_nodes)), -1, dtype=np.int64)
        for m in rows:
            i = int(np.searchsorted(batch_nodes, m.batch_size))
            j = int(np.searchsorted(token_nodes, prod(m.shape)))
            # Two shapes of equal token count share a node: the dearer one stands for both.
            values[:, i, j] = np.maximum(values[:, i, j], _quantities(m))
        _fill_missing(values, batch_nodes, token_nodes)
        values = np.maximum.accumulate(np.maximum.accumulate(values, axis=1), axis=2)
        return cls(batch_nodes=batch_nodes, token_nodes=token_nodes, values=values)

    def interpolate(self, batch_size: IntArray, tokens: IntArray) -> IntArray:
        """Values at ``(batch_size, tokens)``, shape ``[Q, ...]`` with the broadcast shape of the two."""
        batch, token = np.broadcast_arrays(np.asarray(batch_size, np.int64), np.asarray(tokens, np.int64))
        low, high = _bracket(self.batch_nodes, batch)
        left, right = _bracket(self.token_nodes, token)
        x0, x1 = self.token_nodes[left], self.token_nodes[right]
        at_low = _line(token, x0, x1, self.values[:, low, left], self.values[:, low, right])
        at_high = _line(token, x0, x1, self.values[:, high, left], self.values[:, high, right])
        return _line(batch, self.batch_nodes[low], self.batch_nodes[high], at_low, at_high)


def _quantities(m: Measurement) -> IntArray:
    """One column of a grid: per-layer time, recompute, activation, input for each family, then the constants."""
    per_layer = [f + b for f, b in zip(m.forward, m.backward, strict=True)]
    row = [*per_layer, *m.recompute, *m.activation_bytes, *m.input_bytes, m.constant_time, m.constant_bytes]
    return np.asarray(row, dtype=np.int64)


def _fill_missing(values: IntArray, batch_nodes: IntArray, token_nodes: IntArray) -> None:
    """Complete a ragged grid in place: in proportion from the nearest measured batch size, else length."""
    for j in range(len(token_nodes)):
        known = [i for i in range(len(batch_nodes)) if values[0, i, j] >= 0]
        for i in range(len(batch_nodes)):
            if known and values[0, i, j] < 0:
                near = max([k for k in known if k < i], default=known[0])
                values[:, i, j] = values[:, near, j] * batch_nodes[i] // batch_nodes[near]
    known = [j for j in range(len(token_nodes)) if values[0, 0, j] >= 0]
    for j in range(len(token_nodes)):
        if values[0, 0, j] < 0:
            near = max([k for k in known if k < j], default=known[0])
            values[:, :, j] = values[:, :, near] * token_nodes[j] // token_nodes[near]


def _bracket(nodes: IntArray, x: IntArray) -> tuple[IntArray, IntArray]:
    """Indices of the two nodes whose line is used at ``x``: its neighbours, or the last pair outside."""
    right = np.clip(np.searchsorted(nodes, x, side="left"), 1, max(len(nodes) - 1, 1))
    right = np.minimum(right, len(nodes) - 1)
    return np.maximum(right - 1, 0), right


def _line(x: IntArray, x0: IntArray, x1: IntArray, y0: IntArray, y1: IntArray) -> IntArray:
    """Integer line through two nodes; outside of them never less than in proportion to the nearer one."""
    width = np.maximum(x1 - x0, 1)
    inside = y0 + (y1 - y0) * (x - x0) // width
    below, above = y0 * x // x0, y1 * x // x1
    # Floor division keeps the line monotone; the proportion keeps a short extrapolation from reaching zero
    # and a long one from promising that cost stops growing.
    outside = np.where(x < x0, np.maximum(inside, below), np.maximum(inside, above))
    return np.asarray(np.where((x >= x0) & (x <= x1), inside, outside))
