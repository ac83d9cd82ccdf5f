"""The measured profile: a table of measurements of two layers of the model, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from lightning_dcp.interpolation import MAX_TOKENS, MAX_VALUE
from lightning_dcp.plan import PlanError, Shape, read_json

FORMAT = "lightning_dcp.profile"
MAX_LAYERS = 1024
"""Most repeated layers of a model; keeps every sum of Eq. 4 and 6 below 2**62."""

_KEYS = ("identity", "num_layers", "static_bytes", "sync_time", "measurements")
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
        sync_time: nanoseconds of what ends every step, whatever its plan: the reduction of the gradients and the
            optimizer's update (``T_sync``); 0 where it was not measured.
    """

    identity: Mapping[str, str]
    num_layers: tuple[int, ...]
    static_bytes: int
    measurements: tuple[Measurement, ...]
    sync_time: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.num_layers, tuple) or any(type(n) is not int or n < 1 for n in self.num_layers):
            raise ProfileError(f"num_layers is {self.num_layers!r}; it must be a tuple of integers from 1")
        if sum(self.num_layers) > MAX_LAYERS:
            raise ProfileError(f"num_layers is {self.num_layers}; allowed are up to {MAX_LAYERS} layers in all")
        for name in ("static_bytes", "sync_time"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_VALUE:
                raise ProfileError(f"{name} is {value!r}; it must be an integer from 0 to 2**50")
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
            "sync_time": self.sync_time,
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
            content = read_json(text, FORMAT, _KEYS)
            identity, rows = content["identity"], content["measurements"]
            if not isinstance(identity, dict) or not all(isinstance(v, str) for v in identity.values()):
                raise ProfileError(f"identity is {identity!r}; it must map names to strings")
            if not isinstance(rows, list):
                raise ProfileError(f"measurements is {type(rows).__name__}; it must be a list")
            return cls(
                identity=identity,
                num_layers=_frozen(content["num_layers"]),
                static_bytes=content["static_bytes"],
                sync_time=content["sync_time"],
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
