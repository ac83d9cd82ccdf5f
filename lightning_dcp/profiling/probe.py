"""Measuring one size on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_dcp.data.batch import Batch
from lightning_dcp.plan import MicroBatch
from lightning_dcp.profile import Measurement, ProfileError
from lightning_dcp.profiling.clock import Clock, ClockFactory
from lightning_dcp.profiling.errors import is_out_of_memory
from lightning_dcp.profiling.ledger import Ledger
from lightning_dcp.profiling.nested import tensors_in
from lightning_dcp.profiling.probes import Probe
from lightning_dcp.profiling.replay import LayerCost, Replay
from lightning_dcp.profiling.truncation import Recording, recorded, skipped
from lightning_dcp.recompute import RecomputeSwitch
from lightning_dcp.sequence_parallel.context import MicroBatchContext

_LONG = 1024
"""Tokens per rank from which two runs on a CPU are precise enough."""


class Outcome(Protocol):
    """What a probe needs of an opened micro-batch; :class:`~lightning_dcp.execution.StepOutcome` is one."""

    @property
    def objective(self) -> Tensor:
        """Scalar whose gradient the step adds up."""
        ...

    @property
    def context(self) -> MicroBatchContext:
        """The published micro-batch, with its failures."""
        ...


Run = Callable[[MicroBatch, Batch], AbstractContextManager[Outcome]]
"""Runs ``training_step``; the backward belongs inside the context. ``MicroBatchRunner.step`` is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model under measurement.

    Attributes:
        module: the model, whose repeated layers ``switch`` holds.
        switch: the switch over them.
        run: runs its ``training_step``.
        device: where it runs.
    """

    module: nn.Module
    switch: RecomputeSwitch
    run: Run
    device: torch.device


def measure_probe(
    subject: Subject, probe: Probe, micro_batch: MicroBatch, batch: Batch, clocks: ClockFactory
) -> Measurement:
    """Measure one size; called by all ranks of its group together.

    The model runs with two layers of each family; the second is then run alone, again and again, with the inputs
    it got (no noise of a difference). What is outside the layers is timed with all layers skipped.

    Raises:
        ProfileError: the result would be void (attention that cannot be exchanged), or a layer cannot run alone.
    """
    repeats = 2 if subject.device.type == "cpu" and probe.tokens_per_rank >= _LONG else 3
    families = subject.switch.families
    clock = clocks(subject.device, probe.sp_size)
    with _eager_where_compiled_around(subject):
        with ExitStack() as stack:
            recordings, peak = _two_layers(subject, micro_batch, batch, stack)
            costs = [_layer(subject, recording, clock, repeats) for recording in recordings]
        with skipped(recordings):
            # Nothing is exchanged here, whatever the group.
            constant_time = _outside(subject, micro_batch, batch, clocks(subject.device, 1), repeats)
    kept = [min(2, len(family.layers)) for family in families]
    held = sum(count * cost.activation_bytes for count, cost in zip(kept, costs, strict=True))
    batch_bytes = sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(batch)}.values()
    )
    return Measurement(
        batch_size=probe.batch_size,
        shape=probe.shape,
        sp_size=probe.sp_size,
        forward=tuple(cost.forward for cost in costs),
        backward=tuple(cost.backward for cost in costs),
        recompute=tuple(cost.recompute for cost in costs),
        activation_bytes=tuple(cost.activation_bytes for cost in costs),
        input_bytes=tuple(cost.input_bytes for cost in costs),
        constant_time=constant_time,
        constant_bytes=max(0, peak - held) + batch_bytes,
    )


def _two_layers(
    subject: Subject, micro_batch: MicroBatch, batch: Batch, stack: ExitStack
) -> tuple[tuple[Recording, ...], int]:
    """Run a step with two layers per family: how their second layers were called, and the peak without gradients.

    The micro-batch stays open on ``stack``: layers that run alone afterwards exchange over its group.
    """
    base = _start_peak(subject.device)
    with recorded(subject.switch.families) as recordings, Ledger() as ledger:
        outcome = stack.enter_context(subject.run(micro_batch, batch))
        gradients = _gradients(subject, outcome.objective)
    _check(outcome.context)
    sizes = sum(gradient.untyped_storage().nbytes() for gradient in gradients)
    return recordings, max(ledger.peak(without=gradients), _allocator_peak(subject.device, base) - sizes)


def _layer(subject: Subject, recording: Recording, clock: Clock, repeats: int) -> LayerCost:
    if recording.call is None:
        return LayerCost()
    family = recording.family
    index = next(i for i, layer in enumerate(family.layers) if layer is recording.layer)
    depth = tuple(index + 1 if other is family else 0 for other in subject.switch.families)
    replay = Replay(recording.layer, recording.call, subject.switch, depth)
    try:
        return replay.measure(clock, repeats).times(recording.count)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise ProfileError(
            f"layer {index} of {family.name!r} could not run alone with the inputs that it got: {error}. "
            "A layer whose forward changes state that it reads again (a cache) cannot be measured: switch the "
            "cache off for training (Hugging Face: use_cache=False), or name other layers (layers=[...])"
        ) from error


def _outside(subject: Subject, micro_batch: MicroBatch, batch: Batch, clock: Clock, repeats: int) -> int:
    """Time of a step without its repeated layers: median, after a warm-up."""
    times = []
    for _ in range(1 + repeats):
        start = clock.mark()
        with subject.run(micro_batch, batch) as outcome:
            _gradients(subject, outcome.objective)
            del outcome
        times.append(clock.nanoseconds(start, clock.mark()))
    return int(median_low(times[1:]))


def _gradients(subject: Subject, objective: Tensor) -> list[Tensor]:
    """Backward that leaves nothing in the parameters: no accumulation, so none of an engine's hooks fires."""
    parameters = [p for p in subject.module.parameters() if p.requires_grad]
    if not objective.requires_grad or not parameters:
        return []
    try:
        found = torch.autograd.grad(objective, parameters, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise ProfileError(
                "training_step uses activation checkpointing with use_reentrant=True, which is silently wrong "
                "under sequence parallelism; pass use_reentrant=False, or leave recomputation to the strategy"
            ) from error
        raise
    return [gradient for gradient in found if gradient is not None]


def _check(context: MicroBatchContext) -> None:
    if context.failures:
        raise ProfileError("; ".join(dict.fromkeys(context.failures)))


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _allocator_peak(device: torch.device, base: int) -> int:
    """Peak above ``base`` of the device's allocator, which also knows the scratch memory of operators."""
    return torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else 0


def _eager_where_compiled_around(subject: Subject) -> Any:
    """Run eagerly where compiled code encloses the layers: each truncation would be compiled anew."""
    layers = {id(layer) for family in subject.switch.families for layer in family.layers}
    for part in subject.module.modules():
        compiled = hasattr(part, "_orig_mod") or part.__dict__.get("_compiled_call_impl") is not None
        if compiled and any(id(inner) in layers for inner in part.modules() if inner is not part):
            return torch.compiler.set_stance("force_eager")
    return nullcontext()
