"""All probes, agreed between the ranks: the profile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_dcp.data.batch import Batch
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.profile import Measurement, Profile, ProfileError
from lightning_dcp.profiling.clock import ClockFactory, clock_for
from lightning_dcp.profiling.errors import is_out_of_memory
from lightning_dcp.profiling.probe import Subject, measure_probe
from lightning_dcp.profiling.probes import LengthProbes, Probe
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.profiling.stepend import measure_step_end
from lightning_dcp.topology import World

_OUT_OF_MEMORY, _FAILED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What every rank must know to measure; equal on all of them except ``rank`` and ``subject``.

    Attributes:
        subject: the model.
        world: groups that may be measured; each size runs on all its groups at once.
        rank: global rank of this process.
        load: a collated, unsharded micro-batch on the device.
        memory_bytes: limit per rank; what is foreseen to pass it is not tried.
        static_bytes: bytes per rank that no micro-batch changes.
        budget_seconds: when half of it is used, lengths between the shortest and the longest are left out.
        progress: show a progress bar (on rank 0).
        leave: called with an error that this rank has met inside a group, to call off the peers that wait for it.
        clocks: makes the clocks.
    """

    subject: Subject
    world: World
    rank: int
    load: Callable[[MicroBatch], Batch]
    memory_bytes: int
    static_bytes: int = 0
    budget_seconds: float = 20.0
    progress: bool = False
    leave: Callable[[BaseException], None] | None = None
    clocks: ClockFactory = clock_for


def measure(survey: Survey, lengths: Sequence[LengthProbes], identity: Mapping[str, str]) -> Profile:
    """Measure a model on the ranks of this run; the model is left bit-equal, also after an error.

    Called by every rank. Collectives: one all-reduce (maximum) over the world per length, of that length's table;
    inside a probe only the exchanges of its own group; then those of :func:`measure_step_end`. So all ranks end with
    the same profile, that of the slowest rank; a size that ran out of memory anywhere is left out everywhere.

    Args:
        survey: the model and the ranks.
        lengths: what to measure, shortest first.
        identity: what the numbers depend on; it is kept in the profile.

    Raises:
        ProfileError: on all ranks: no setting of one length fits into memory, or a probe failed on some rank.
    """
    table: list[Measurement] = []
    started = time.monotonic()
    elapsed = 0.0
    total = sum(len(length.probes) for length in lengths)
    bar = tqdm(
        total=total, desc="Measuring two layers", disable=not survey.progress or survey.rank != 0, leave=False
    )
    with untouched(survey.subject.module), bar:
        for length in lengths:
            if length.needed or elapsed < survey.budget_seconds / 2:
                measured, elapsed = _measure_length(survey, length, table, started)
                table += measured
            bar.update(len(length.probes))
    device, ranks = survey.subject.device, survey.world.world_size
    sync_time = measure_step_end(survey.subject.module, ranks, device, survey.clocks(device, ranks))
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return Profile(
        identity=dict(identity),
        num_layers=survey.subject.switch.num_layers,
        static_bytes=survey.static_bytes,
        measurements=tuple(table),
        sync_time=sync_time,
    )


def _measure_length(
    survey: Survey, length: LengthProbes, table: Sequence[Measurement], started: float
) -> tuple[list[Measurement], float]:
    """The measurements of one length as all ranks agree on them, and the seconds used so far."""
    rows: list[Measurement | None] = []
    states: list[int] = []
    failure: Exception | None = None
    for probe in length.probes:
        row, state = None, _OUT_OF_MEMORY
        if (
            _foreseen_bytes(table, probe, survey.subject.switch.num_layers) + survey.static_bytes
            <= survey.memory_bytes
        ):
            try:
                row, state = _measure_here(survey, probe), 0
            except Exception as error:
                # Outside of this block the traceback, and with it the graph, is gone.
                state = _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
                failure = failure or (None if state == _OUT_OF_MEMORY else error)
                if state == _FAILED and probe.sp_size > 1 and survey.leave is not None:
                    # Its peers wait in an exchange, or come to one: they raise as this rank's connections close.
                    survey.leave(error)
        if state == _OUT_OF_MEMORY and survey.subject.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        rows.append(row)
        states.append(state)
    agreed = _agree(survey, length.probes, rows, [*states, int(1000 * (time.monotonic() - started))])
    *states, milliseconds = agreed.states
    if _FAILED in states:
        if failure is not None:
            raise failure
        raise ProfileError(f"measuring samples of shape {length.shape} failed on another rank; see its error")
    _check_fits(survey, length, states)
    return agreed.rows, milliseconds / 1000


def _measure_here(survey: Survey, probe: Probe) -> Measurement | None:
    """Measure a probe with this rank's group; ``None`` for a rank that no group of the size holds."""
    blocks = survey.world.blocks_of(probe.sp_size)
    first = next((first for first, size in blocks if first <= survey.rank < first + size), None)
    if first is None:
        return None
    micro_batch = probe.micro_batch(first, len(survey.subject.switch.families))
    return measure_probe(survey.subject, probe, micro_batch, survey.load(micro_batch), survey.clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    rows: list[Measurement]
    states: list[int]


def _agree(
    survey: Survey, probes: Sequence[Probe], rows: Sequence[Measurement | None], states: list[int]
) -> _Agreed:
    """Maximum over the ranks of all numbers of one length: one all-reduce."""
    families = len(survey.subject.switch.families)
    width = 5 * families + 2
    values = [_flat(row) if row is not None else [-1] * width for row in rows]
    vector = torch.tensor([*states, *(v for row in values for v in row)], dtype=torch.int64)
    if survey.world.world_size > 1:
        vector = vector.to(survey.subject.device)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    numbers: list[int] = vector.tolist()
    agreed, rest = numbers[: len(states)], numbers[len(states) :]
    found = [
        _unflat(probe, rest[i * width : (i + 1) * width], families)
        for i, probe in enumerate(probes)
        if agreed[i] == 0 and rest[i * width] >= 0
    ]
    return _Agreed(rows=found, states=agreed)


def _flat(row: Measurement) -> list[int]:
    per_family = (row.forward, row.backward, row.recompute, row.activation_bytes, row.input_bytes)
    # The constants first: they exist without any family.
    return [row.constant_time, row.constant_bytes, *(value for values in per_family for value in values)]


def _unflat(probe: Probe, numbers: Sequence[int], families: int) -> Measurement:
    forward, backward, recompute, activation, inputs = (
        tuple(numbers[2 + i * families : 2 + (i + 1) * families]) for i in range(5)
    )
    return Measurement(
        batch_size=probe.batch_size,
        shape=probe.shape,
        sp_size=probe.sp_size,
        forward=forward,
        backward=backward,
        recompute=recompute,
        activation_bytes=activation,
        input_bytes=inputs,
        constant_time=numbers[0],
        constant_bytes=numbers[1],
    )


def _foreseen_bytes(table: Sequence[Measurement], probe: Probe, num_layers: tuple[int, ...]) -> int:
    """Peak of a probe by the line through the two largest measured sizes; 0 as long as there are not two.

    Trying it would be no test on a CPU, where the system kills the process, and with several ranks one that fails
    alone leaves the others waiting.
    """
    peaks: dict[float, int] = {}
    for row in table:
        held = sum(min(2, n) * m for n, m in zip(num_layers, row.activation_bytes, strict=True))
        tokens = row.batch_size * prod(row.shape) / row.sp_size
        peaks[tokens] = max(peaks.get(tokens, 0), held + row.constant_bytes)
    if len(peaks) < 2:
        return 0
    (x0, y0), (x1, y1) = sorted(peaks.items())[-2:]
    if probe.tokens_per_rank <= x1:
        return 0
    return int(y1 + (y1 - y0) * (probe.tokens_per_rank - x1) / (x1 - x0))


def _check_fits(survey: Survey, length: LengthProbes, states: Sequence[int]) -> None:
    alone = [(probe, state) for probe, state in zip(length.probes, states, strict=True) if probe.batch_size == 1]
    if all(state == _OUT_OF_MEMORY for _, state in alone):
        sizes = [probe.sp_size for probe, _ in alone]
        raise ProfileError(_does_not_fit(length.shape, sizes, survey.memory_bytes))


def _does_not_fit(shape: Shape, sp_sizes: list[int], memory_bytes: int) -> str:
    return (
        f"a sample of shape {shape} does not fit into {memory_bytes / 1e9:.3g} GB per rank, even alone and at "
        f"sequence-parallel sizes {sp_sizes} (in this order). Raise memory_limit, allow larger sp_sizes (they "
        "must divide the heads), use more ranks, or cut long samples"
    )
