"""Plans as plain values: which samples run where, in which order and with which settings.

Everything here is an integer or a tuple of integers, so that every rank derives the same plan from the same
input and can prove it by comparing digests. Only the standard library and NumPy are imported.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from math import prod
from operator import gt
from typing import Any

import numpy as np

Shape = tuple[int, ...]
_Integers = np.ndarray[Any, np.dtype[np.int64]]

FORMAT = "lightning_dcp.plan"
MAX_WORLD_SIZE = 2**20
"""Most ranks of a plan; a larger number in a file is damage, and would only exhaust the memory."""

_LIMIT = 2**62
_MAX_DEPTH = 8


class PlanError(ValueError):
    """A plan, or a file that should hold one, breaks a rule; the message says which and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that run together in one forward and backward on one sequence-parallel group (``d_i``).

    Attributes:
        sample_ids: positions of the samples in the dataset, in batch order.
        shapes: true size of each sample, ``(tokens,)`` or ``(frames, patches)``, before padding.
        padded_shape: size that every sample is padded to; its first axis is a multiple of ``sp_size``.
            For a packed micro-batch the total size of the one row.
        packed: the samples stand one behind the other in a single row.
        first_rank: first global rank of the group; the group is ``first_rank .. first_rank + sp_size - 1``.
        sp_size: sequence-parallel size ``p_i``.
        recompute: recomputed layers ``r_i``, one count per family of repeated layers.
        nanoseconds: predicted time of the micro-batch on each of its ranks (Eq. 4).
        bytes: predicted peak memory of each of its ranks (Eq. 6).

    Raises:
        PlanError: a field is of the wrong type or out of range.
    """

    sample_ids: tuple[int, ...]
    shapes: tuple[Shape, ...]
    padded_shape: Shape
    packed: bool = False
    first_rank: int
    sp_size: int
    recompute: tuple[int, ...] = ()
    nanoseconds: int
    bytes: int

    def __post_init__(self) -> None:
        # Plans of thousands of micro-batches are made in milliseconds: one look at all integers, and only where
        # something is wrong the question which.
        if not self._holds_integers():
            self._check_integers()
        if not isinstance(self.packed, bool):
            raise PlanError(f"packed is {self.packed!r}; it must be True or False")
        if not self.sample_ids or len(self.sample_ids) != len(self.shapes):
            raise PlanError(
                f"a micro-batch has {len(self.sample_ids)} sample ids and {len(self.shapes)} shapes; "
                "it needs at least one sample and one shape for each"
            )
        axes = len(self.padded_shape)
        if set(map(len, self.shapes)) != {axes}:
            shape = next(shape for shape in self.shapes if len(shape) != axes)
            raise PlanError(f"shape {shape} and padded shape {self.padded_shape} differ in their number of axes")
        self._check_fit()

    def _holds_integers(self) -> bool:
        tuples = (self.sample_ids, self.shapes, self.padded_shape, self.recompute)
        if set(map(type, tuples)) != {tuple} or not set(map(type, self.shapes)) <= {tuple}:
            return False
        sizes = (self.sp_size, *self.padded_shape, *chain.from_iterable(self.shapes))
        held = (*self.sample_ids, *self.recompute, self.first_rank, self.nanoseconds, self.bytes, *sizes)
        return set(map(type, held)) == {int} and min(held) >= 0 < min(sizes) and max(held) < _LIMIT

    def _check_integers(self) -> None:
        _check_ints("sample_ids", self.sample_ids, minimum=0)
        _check_ints("padded_shape", self.padded_shape, minimum=1)
        if not isinstance(self.shapes, tuple):
            raise PlanError(
                f"shapes is {type(self.shapes).__name__}; it must be a tuple with one shape per sample"
            )
        _check_ints("recompute", self.recompute, minimum=0)
        for name in ("first_rank", "nanoseconds", "bytes"):
            _check_ints(name, (getattr(self, name),), minimum=0)
        _check_ints("sp_size", (self.sp_size,), minimum=1)
        for shape in self.shapes:
            _check_ints("shapes", shape, minimum=1)

    def _check_fit(self) -> None:
        if not self.padded_shape or self.padded_shape[0] % self.sp_size:
            raise PlanError(
                f"padded shape is {self.padded_shape}; its first axis must be a multiple of sp_size {self.sp_size}"
            )
        needed = list(map(max, zip(*self.shapes, strict=True)))
        if self.packed:
            needed[0] = sum(shape[0] for shape in self.shapes)
        if any(map(gt, needed, self.padded_shape)):
            raise PlanError(f"samples of shapes {self.shapes} do not fit the padded shape {self.padded_shape}")

    @property
    def batch_size(self) -> int:
        """Number of samples ``b_i``."""
        return len(self.sample_ids)

    @property
    def ranks(self) -> range:
        """Global ranks of the sequence-parallel group."""
        return range(self.first_rank, self.first_rank + self.sp_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples, without padding."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed, with padding."""
        return prod(self.padded_shape) * (1 if self.packed else self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """What every rank does in one optimizer step.

    The micro-batches are stored in plan order. A rank runs those of its widest group first, equal groups in
    plan order (see :meth:`of_rank`): as the groups are nested or disjoint, no rank waits inside a group in
    planned time and no deadlock is possible.

    Attributes:
        world_size: number of ranks ``W``.
        micro_batches: all micro-batches of the step. A rank may have none.
        lower_bound: nanoseconds that no plan of the same samples and cost model can beat; 0 if unknown.
        lockstep: all ranks start their ``k``-th micro-batch together, since the engine communicates in each; a rank
            without one runs a filler of weight zero then.
        makespan: nanoseconds from the start of the first micro-batch to the end of the last: those of the busiest
            rank, in lockstep the sum over the rounds of each round's longest micro-batch.

    Raises:
        PlanError: a group leaves the world, two groups overlap without one holding the other, a sample stands
            twice, the samples differ in their number of axes, the lower bound lies above the makespan, or the
            times add up to 2**62 ns.
    """

    world_size: int
    micro_batches: tuple[MicroBatch, ...]
    lower_bound: int = 0
    lockstep: bool = False
    makespan: int = field(init=False)

    def __post_init__(self) -> None:
        _check_ints("world_size", (self.world_size,), minimum=1)
        _check_ints("lower_bound", (self.lower_bound,), minimum=0)
        if self.world_size > MAX_WORLD_SIZE:
            raise PlanError(f"world_size is {self.world_size}; allowed are up to {MAX_WORLD_SIZE} ranks")
        if not isinstance(self.micro_batches, tuple):
            raise PlanError(f"micro_batches is {type(self.micro_batches).__name__}; it must be a tuple")
        self._check_groups()
        self._check_samples()
        if not isinstance(self.lockstep, bool):
            raise PlanError(f"lockstep is {self.lockstep!r}; it must be True or False")
        makespan = sum(self.rounds()) if self.lockstep else int(max(self.busy()))
        object.__setattr__(self, "makespan", makespan)
        if self.lower_bound > self.makespan:
            raise PlanError(f"lower bound {self.lower_bound} ns lies above the makespan {self.makespan} ns")

    def _check_samples(self) -> None:
        ids = self.sample_ids
        if len(set(ids)) != len(ids):
            counts = Counter(ids)
            twice = sorted(i for i, count in counts.items() if count > 1)[:5]
            raise PlanError(
                f"samples {twice} stand in more than one place; each sample runs exactly once in a step"
            )
        axes = sorted({len(m.padded_shape) for m in self.micro_batches})
        if len(axes) > 1:
            raise PlanError(f"the samples have shapes of {axes} axes; all must have the same number")
        # Sums of int64 nanoseconds wrap silently; Python's do not.
        total = sum(m.nanoseconds for m in self.micro_batches)
        if total >= _LIMIT:
            raise PlanError(f"the micro-batches last {total} ns in all; allowed is less than 2**62 ns")

    def _check_groups(self) -> None:
        groups = sorted({(m.first_rank, m.sp_size) for m in self.micro_batches}, key=lambda g: (g[0], -g[1]))
        open_ends: list[tuple[int, int]] = []
        for first, size in groups:
            if first + size > self.world_size:
                raise PlanError(f"group {first}..{first + size - 1} leaves the world of {self.world_size} ranks")
            while open_ends and open_ends[-1][1] <= first:
                open_ends.pop()
            if open_ends and first + size > open_ends[-1][1]:
                raise PlanError(
                    f"groups {open_ends[-1][0]}..{open_ends[-1][1] - 1} and {first}..{first + size - 1} overlap; "
                    "two groups of a plan must be nested or disjoint"
                )
            open_ends.append((first, first + size))

    def busy(self) -> _Integers:
        """Planned nanoseconds of work per rank, shape ``[W]``."""
        return loads_of(
            self.world_size, self._column("first_rank"), self._column("sp_size"), self._column("nanoseconds")
        )

    def _column(self, name: str) -> _Integers:
        return np.asarray([getattr(m, name) for m in self.micro_batches], dtype=np.int64)

    def rounds(self) -> list[int]:
        """Nanoseconds of the longest ``k``-th micro-batch of any rank, for each ``k``.

        A micro-batch has the same number on all of its ranks: what they run before it belongs to wider groups, which
        hold all of them, or to the same group.
        """
        started = [0] * self.world_size
        longest: list[int] = []
        for m in sorted(self.micro_batches, key=lambda m: -m.sp_size):
            number = started[m.first_rank]
            started[m.first_rank : m.first_rank + m.sp_size] = [number + 1] * m.sp_size
            if number == len(longest):
                longest.append(0)
            longest[number] = max(longest[number], m.nanoseconds)
        return longest

    def of_rank(self, rank: int) -> tuple[MicroBatch, ...]:
        """Micro-batches of one rank in the order in which it runs them; may be empty.

        Raises:
            PlanError: ``rank`` is not in the world.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not in the world of {self.world_size} ranks")
        mine = [m for m in self.micro_batches if rank in m.ranks]
        return tuple(sorted(mine, key=lambda m: -m.sp_size))

    @property
    def gap(self) -> float:
        """``makespan / lower_bound - 1``: the proven distance from the optimum; infinite without a bound."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound else float("inf")

    @property
    def idle_ratio(self) -> float:
        """Share of ``W * makespan`` in which ranks do nothing useful (Eq. 3 with each group counted ``p_i`` times)."""
        worked = sum(m.nanoseconds * m.sp_size for m in self.micro_batches)
        return 1.0 - worked / (self.world_size * self.makespan) if self.makespan else 0.0

    @property
    def padding_ratio(self) -> float:
        """Share of the computed tokens that are padding."""
        padded = sum(m.padded_tokens for m in self.micro_batches)
        return 1.0 - self.num_tokens / padded if padded else 0.0

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of all samples of the step, in the order of the micro-batches."""
        return tuple(i for m in self.micro_batches for i in m.sample_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples of the step, without padding."""
        return sum(m.num_tokens for m in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Samples of the step."""
        return sum(m.batch_size for m in self.micro_batches)

    def digest(self) -> int:
        """A 40-bit fingerprint of the whole plan: equal plans have equal digests on every rank and machine.

        Different plans share one with a chance of ``2**-40``. A float64 carries it exactly.
        """
        state = hashlib.blake2b(digest_size=5)
        head = [self.world_size, self.lower_bound, self.lockstep, len(self.micro_batches)]
        state.update(np.asarray(head, "<i8").tobytes())
        for m in self.micro_batches:
            shapes = [axis for shape in (*m.shapes, m.padded_shape) for axis in shape]
            scalars = [m.packed, m.first_rank, m.sp_size, m.nanoseconds, m.bytes]
            sizes = [m.batch_size, len(m.padded_shape), len(m.recompute)]
            values = [*sizes, *m.sample_ids, *shapes, *scalars, *m.recompute]
            state.update(np.asarray(values, "<i8").tobytes())
        return int.from_bytes(state.digest(), "little")

    def to_json(self) -> str:
        """The plan as one line of JSON; :meth:`from_json` gives an equal plan back."""
        content = {
            "format": FORMAT,
            "world_size": self.world_size,
            "lower_bound": self.lower_bound,
            "lockstep": self.lockstep,
            "micro_batches": [{f.name: getattr(m, f.name) for f in fields(m)} for m in self.micro_batches],
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> IterationPlan:
        """Read a plan that :meth:`to_json` wrote.

        Raises:
            PlanError: the text is no JSON, of another format, or holds anything but a valid plan.
        """
        content = read_json(text, FORMAT, ("world_size", "lower_bound", "lockstep", "micro_batches"))
        rows = content["micro_batches"]
        if not isinstance(rows, list):
            raise PlanError(f"micro_batches is {type(rows).__name__}; it must be a list")
        return cls(
            world_size=content["world_size"],
            lower_bound=content["lower_bound"],
            lockstep=content["lockstep"],
            micro_batches=tuple(_micro_batch(row) for row in rows),
        )


def loads_of(world_size: int, first_rank: _Integers, sp_size: _Integers, nanoseconds: _Integers) -> _Integers:
    """Busy nanoseconds per rank, shape ``[W]``, of micro-batches ``[m]``."""
    edges = np.zeros(world_size + 1, dtype=np.int64)
    np.add.at(edges, first_rank, nanoseconds)
    np.subtract.at(edges, first_rank + sp_size, nanoseconds)
    return np.asarray(np.cumsum(edges[:-1]))


def read_json(text: str, expected_format: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Parse an object with exactly ``format`` and ``keys``; the common gate of all files that we read back.

    Raises:
        PlanError: the text is no JSON, NaN or Infinity stand in it, or the keys or the format differ.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        _check_depth(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"this is no JSON that we wrote: {error}") from error
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if found != expected_format:
        raise PlanError(f"format is {found!r}; expected {expected_format!r}")
    _check_keys(content, ("format", *keys))
    return dict(content)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"a key stands twice among {sorted(key for key, _ in pairs)[:20]}")
    return dict(pairs)


def _check_depth(content: Any) -> None:
    """Refuse what is nested deeper than anything we write, before code that recurses (or ``repr``) meets it."""
    level = [content]
    for _ in range(_MAX_DEPTH):
        nodes = [
            node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
        ]
        level = [child for children in nodes for child in children]
    if level:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def _check_keys(row: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    missing, foreign = set(keys) - row.keys(), row.keys() - set(keys)
    if missing or foreign:
        raise PlanError(f"keys missing: {sorted(missing)}; keys not known: {sorted(foreign)[:5]}")


def _micro_batch(row: Any) -> MicroBatch:
    if not isinstance(row, dict):
        raise PlanError(f"a micro-batch is {type(row).__name__}; it must be an object")
    _check_keys(row, tuple(f.name for f in fields(MicroBatch)))
    frozen = {name: _freeze(value) for name, value in row.items()}
    for name in ("sample_ids", "shapes", "padded_shape", "recompute"):
        if not isinstance(frozen[name], tuple):
            raise PlanError(f"{name} is {frozen[name]!r}; it must be a list")
    return MicroBatch(**frozen)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value


def _check_ints(name: str, values: Any, *, minimum: int) -> None:
    if not isinstance(values, tuple):
        raise PlanError(f"{name} is {values!r}; it must be a tuple of integers")
    for value in values:
        # bool is a subclass of int, yet True as a rank is a mistake; NumPy integers would not survive JSON.
        if type(value) is not int or not minimum <= value < _LIMIT:
            raise PlanError(f"{name} holds {value!r}; allowed are integers from {minimum} to below 2**62")
