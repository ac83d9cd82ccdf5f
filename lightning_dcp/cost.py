"""The measured profile and the cost model that the planners ask: Eq. 4 to 6 in integers.

A profile is a table of measurements. The cost model interpolates it linearly in the number of tokens and in
the batch size. All arithmetic is on int64 nanoseconds and bytes, so every rank gets the same answer to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.interpolation import MAX_TOKENS, MAX_VALUE, Grid, IntArray
from lightning_dcp.plan import PlanError, Shape, read_json

__all__ = [
    "INFEASIBLE",
    "CostModel",
    "IntArray",
    "Measurement",
    "Profile",
    "ProfileError",
    "RecomputePolicy",
    "Settings",
]

RecomputePolicy = Literal["auto", "none", "full"]

FORMAT = "lightning_dcp.profile"
INFEASIBLE = 2**62
"""Nanoseconds of a setting that no number of recomputed layers makes fit the memory limit."""
MAX_LAYERS = 1024
"""Most repeated layers of a model; keeps every sum of Eq. 4 and 6 below 2**62."""

_MAX_COMBINATIONS = 1024
_TUPLES = ("shape", "forward", "backward", "recompute", "activation_bytes", "input_bytes")


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
            if isinstance(value, tuple) != (field.name in _TUPLES):
                kind = "a tuple of integers" if field.name in _TUPLES else "an integer"
                raise ProfileError(f"{field.name} is {value!r}; it must be {kind}")
            minimum = 1 if field.name in ("batch_size", "shape", "sp_size") else 0
            if any(type(v) is not int or not minimum <= v <= MAX_VALUE for v in _as_tuple(value)):
                raise ProfileError(f"{field.name} is {value!r}; allowed are integers from {minimum} to 2**50")
        if not self.shape or max(self.batch_size, prod(self.shape)) > MAX_TOKENS:
            raise ProfileError(
                f"batch size {self.batch_size} of shape {self.shape}; allowed are shapes of at least one axis, "
                f"samples and batches of up to {MAX_TOKENS}"
            )


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
        if not isinstance(self.num_layers, tuple) or any(type(n) is not int or n < 1 for n in self.num_layers):
            raise ProfileError(f"num_layers is {self.num_layers!r}; it must be a tuple of integers from 1")
        if sum(self.num_layers) > MAX_LAYERS:
            raise ProfileError(f"num_layers is {self.num_layers}; allowed are up to {MAX_LAYERS} layers in all")
        if type(self.static_bytes) is not int or not 0 <= self.static_bytes <= MAX_VALUE:
            raise ProfileError(f"static_bytes is {self.static_bytes!r}; it must be an integer from 0 to 2**50")
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
            identity, rows = content["identity"], content["measurements"]
            if not isinstance(identity, dict) or not all(isinstance(v, str) for v in identity.values()):
                raise ProfileError(f"identity is {identity!r}; it must map names to strings")
            if not isinstance(rows, list):
                raise ProfileError(f"measurements is {type(rows).__name__}; it must be a list")
            return cls(
                identity=identity,
                num_layers=_frozen(content["num_layers"]),
                static_bytes=content["static_bytes"],
                measurements=tuple(_measurement(row) for row in rows),
            )
        except PlanError as error:
            raise ProfileError(f"this is no profile that we wrote: {error}") from error


def _measurement(row: Any) -> Measurement:
    names = {field.name for field in fields(Measurement)}
    if not isinstance(row, dict) or row.keys() != names:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ProfileError(f"a measurement is {found}; it must be an object with the keys {sorted(names)}")
    return Measurement(**{name: _frozen(value) for name, value in row.items()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
    stands on it): where a measurement says otherwise, it is raised to its neighbour's value. Beyond the measured
    sizes the last line is carried on, not below proportion; so lengths far beyond the longest probe come out too
    cheap where attention grows with their square.

    Args:
        profile: the measurements.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers
        self.sp_sizes = tuple(sorted({m.sp_size for m in profile.measurements}))
        self._grids = {
            p: Grid.build(
                (m.batch_size, prod(m.shape), _quantities(m)) for m in profile.measurements if m.sp_size == p
            )
            for p in self.sp_sizes
        }

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

        Algorithm 1 as meant: the smallest ``r`` within the memory. With several families the counts of least
        time within the memory, of equal ones the fewest (exact up to 1024 combinations of the smaller families;
        beyond, their counts are tried in equal steps). Where nothing fits, the counts of least memory.

        Args:
            sp_size: ``p``.
            batch_size: samples per micro-batch.
            tokens: padded tokens of each sample; broadcast against ``batch_size``.
            memory_bytes: limit per rank.
            policy: ``"auto"`` searches, ``"none"`` recomputes nothing, ``"full"`` every layer.
        """
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(tokens))
        counts = terms.counts(policy, memory_bytes - self.profile.static_bytes)
        memory = terms.memory(counts, self.profile.static_bytes)
        time = np.where(memory <= memory_bytes, terms.time(counts), INFEASIBLE)
        return Settings(nanoseconds=time, bytes=memory, recompute=counts)

    def batch_sizes(self, limit: int) -> tuple[int, ...]:
        """Batch sizes worth trying up to ``limit``: all up to 8, then four per octave, and the measured ones."""
        spaced = {(4 + k) << octave for octave in range(1, 31) for k in range(4)}
        measured = {int(b) for grid in self._grids.values() for b in grid.batch_nodes}
        return tuple(sorted(b for b in {*range(1, 9), *spaced, *measured} if b <= limit))

    def least_share(
        self,
        sp_size: int,
        batch_range: tuple[IntArray, IntArray],
        tokens: IntArray,
        memory_bytes: int,
        policy: RecomputePolicy = "auto",
    ) -> tuple[IntArray, IntArray]:
        """Lower bounds of ``T(b)`` and of ``T(b) / b`` over ranges of batch sizes; exact for ranges of one.

        Between two measured batch sizes ``T`` is a line in ``b`` for each ``r``, so ``T / b`` is least at an end
        of the range; and what fits the memory at any ``b`` of the range fits it at the first.

        Args:
            sp_size: ``p``.
            batch_range: first and last ``b`` of each range, without a measured batch size between them.
            tokens: padded tokens of each sample; broadcast against the ranges.
            memory_bytes: limit per rank.
            policy: as in :meth:`settings`.

        Returns:
            Nanoseconds of the first ``b`` (:data:`INFEASIBLE` if it does not fit), and nanoseconds per sample,
            rounded down.
        """
        low, high = (np.asarray(end, dtype=np.int64) for end in batch_range)
        first = self.settings(sp_size, low, tokens, memory_bytes, policy).nanoseconds
        share = first // low
        if (low == high).all():
            return first, share
        at_high = self._terms(sp_size, high, tokens)
        mixed = replace(
            self._terms(sp_size, low, tokens),
            plain_time=at_high.plain_time,
            recompute_time=at_high.recompute_time,
            constant_time=at_high.constant_time,
        )
        last = mixed.time(mixed.counts(policy, memory_bytes - self.profile.static_bytes))
        # Each quantity was rounded down once, by less than a nanosecond a layer.
        slack = 2 * sum(self.num_layers) + 1
        least = np.maximum(np.minimum((first - slack) // low, (last - slack) // high), 0)
        return first, np.asarray(np.where(low == high, share, least))

    def _terms(self, sp_size: int, batch_size: IntArray, tokens: IntArray) -> _Terms:
        if sp_size not in self._grids:
            raise ValueError(f"sequence-parallel size {sp_size} was not profiled; the profile has {self.sp_sizes}")
        values = self._grids[sp_size].at(batch_size, tokens)
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

    def counts(self, policy: RecomputePolicy, room: int) -> IntArray:
        """Counts per family as the policy says, shape ``[..., families]``."""
        if policy == "auto":
            return self.fewest_recomputed(room)
        shape = (*self.constant_time.shape, len(self.layers))
        return np.broadcast_to(self.layers if policy == "full" else 0 * self.layers, shape)

    def fewest_recomputed(self, room: int) -> IntArray:
        """Counts per family of least time within ``room`` bytes, shape ``[..., families]``."""
        counts = np.zeros((*self.constant_time.shape, len(self.layers)), dtype=np.int64)
        short = self.memory(counts, 0) > room
        if short.any() and len(self.layers):
            counts[short] = self._only(short)._search(room)
        return counts

    def _only(self, chosen: NDArray[np.bool_]) -> _Terms:
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name != "layers"}
        return replace(self, **arrays)

    def _search(self, room: int) -> IntArray:
        free = int(np.argmax(self.layers))
        best = np.zeros((len(self.constant_time), len(self.layers)), dtype=np.int64)
        best_score = np.full(len(best), np.iinfo(np.int64).max)
        for others in _combinations(self.layers, free):
            counts = np.tile(np.asarray(others, dtype=np.int64), (len(best), 1))
            missing = self.memory(counts, 0) - room
            gain = np.maximum((self.activation - self.layer_input)[:, free], 1)
            # All layers of a family cost a whole layer's m at the peak, so one less is tried first.
            for count in (np.clip(-(-missing // gain), 0, self.layers[free] - 1), self.layers[free]):
                counts[:, free] = count
                memory = self.memory(counts, 0)
                # What does not fit is ranked behind all that does, by memory.
                score = np.where(memory <= room, self.time(counts), INFEASIBLE + memory)
                better = score < best_score
                best[better], best_score[better] = counts[better], score[better]
        return best


def _combinations(layers: IntArray, free: int) -> Iterator[tuple[int, ...]]:
    """Counts of all families but ``free`` (0 there), fewest first."""
    others = [int(n) if k != free else 0 for k, n in enumerate(layers)]
    step = 1
    while prod(n // step + 2 for n in others if n) > _MAX_COMBINATIONS and step <= max(others):
        step *= 2
    choices = [sorted({*range(0, n + 1, step), n}) for n in others]
    yield from sorted(product(*choices), key=lambda counts: (sum(counts), counts))


def _quantities(m: Measurement) -> IntArray:
    """One column of a grid: per-layer time, recompute, activation, input for each family, then the constants."""
    per_layer = [f + b for f, b in zip(m.forward, m.backward, strict=True)]
    row = [*per_layer, *m.recompute, *m.activation_bytes, *m.input_bytes, m.constant_time, m.constant_bytes]
    return np.asarray(row, dtype=np.int64)
