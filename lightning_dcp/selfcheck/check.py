"""Whether the user's model computes the same whatever the plan, found out on two real samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.selfcheck.findings import Findings, PlainRunError
from lightning_dcp.selfcheck.runs import Bench
from lightning_dcp.selfcheck.samples import Row, Samples, choose
from lightning_dcp.topology import World


class SelfCheckError(RuntimeError):
    """The model cannot be trained by plans as it is; raised on every rank with the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedoms:
    """What a plan may choose for this model.

    Attributes:
        exact_shapes: padding changes what the model computes: a micro-batch may only hold samples of one shape, on
            a group whose size divides their first axis.
        sp_sizes: sequence-parallel sizes that compute the same as one rank; always holds 1.
        recompute: layers may be recomputed.
        messages: a paragraph for each freedom that was switched off and for what could not be checked.
    """

    exact_shapes: bool
    sp_sizes: tuple[int, ...]
    recompute: bool
    messages: tuple[str, ...] = ()


def self_check(  # noqa: PLR0913 - each is a fact that setup() knows and nobody bundles
    *,
    runner: MicroBatchRunner,
    load: Callable[[MicroBatch], Batch],
    sample_ids: tuple[int, ...],
    shapes: tuple[Shape, ...],
    world: World,
    num_layers: tuple[int, ...],
    rank: int,
    device: torch.device,
    strict: bool,
) -> Freedoms:
    """Compare count and gradient of two samples over everything that a plan may choose; called by every rank.

    Three comparisons, each with dropout off and in float32: one padded micro-batch of both samples against each
    sample alone; each sequence-parallel size against one rank; all layers recomputed against none. Gradients are
    those of the weighted mean over the items, summed over the ranks. A freedom that changes them is switched off
    with a warning that names the first module whose output differs.

    The module is left bit-equal (weights, buffers, gradients, random numbers, flags, hooks), also on an error.

    Not found: what two short samples do not show (a rule that starts at some length, an error in data that they do
    not hold), code that gets no gradient (behind a zero-initialised layer that also hides its value), differences
    below the tolerance (1e-4 of a parameter's gradient in float32, a tenth where the model itself rounds to
    bfloat16), and dropout, of which only the absence is compared.

    Args:
        runner: opens micro-batches of the engine's module.
        load: gives the collated, unsharded batch of a micro-batch, on the device.
        sample_ids: two samples of different length, or more to choose from: the first with an item of the loss, and
            the next with one and another shape.
        shapes: their true shapes.
        world: ranks and groups.
        num_layers: layers of each family that can be recomputed.
        rank: this rank.
        device: this rank's device.
        strict: raise where a freedom would be switched off or nothing could be checked.

    Raises:
        SelfCheckError: on all ranks; the samples fail on one rank, unpadded and not recomputed, or ``strict``.
    """
    bench = Bench(runner=runner, load=load, world=world, rank=rank, device=device, num_layers=num_layers)
    findings = Findings(bench, _samples(bench, sample_ids, shapes))
    try:
        freedoms = _freedoms(findings, world)
    except PlainRunError as error:
        raise SelfCheckError(str(error)) from error
    if strict and freedoms.messages:
        raise SelfCheckError("\n".join(freedoms.messages))
    for message in freedoms.messages:
        rank_zero_warn(message)
    return freedoms


def _samples(bench: Bench, sample_ids: tuple[int, ...], shapes: tuple[Shape, ...]) -> Samples:
    """The two samples to compare, as rank 0 chooses them."""
    chosen: tuple[int, ...] = ()
    if bench.rank == 0:
        candidates = [
            Row(sample_ids=(i,), shapes=(s,), padded_shape=s) for i, s in zip(sample_ids, shapes, strict=True)
        ]
        with untouched(bench.module):  # reading samples may draw random numbers
            chosen = choose(shapes, [bench.items(row) for row in candidates])
    chosen = bench.everyone(chosen)[0]
    return Samples.of(tuple(sample_ids[i] for i in chosen), tuple(shapes[i] for i in chosen), bench.world.sp_sizes)


def _freedoms(findings: Findings, world: World) -> Freedoms:
    """All comparisons, in the order in which one relies on another."""
    padding, sp_sizes, recompute = True, world.sp_sizes, True
    if findings.usable():
        padding = findings.padding()
        sp_sizes = findings.sharding()
        recompute = findings.recompute()
    return Freedoms(
        exact_shapes=not padding,
        sp_sizes=sp_sizes,
        recompute=recompute,
        messages=tuple(findings.messages),
    )
