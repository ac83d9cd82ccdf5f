"""The comparisons of the self-check and the paragraph for each that fails."""

from __future__ import annotations

import math

import torch

from lightning_dcp.selfcheck import advice
from lightning_dcp.selfcheck.comparison import FLOAT32, difference, tolerance_for, total_norm
from lightning_dcp.selfcheck.conditions import half_precision
from lightning_dcp.selfcheck.naming import Naming
from lightning_dcp.selfcheck.results import Case, Result
from lightning_dcp.selfcheck.runs import Bench
from lightning_dcp.selfcheck.samples import Row, Samples


class PlainRunError(RuntimeError):
    """The samples cannot even be run in the plainest way."""


class Findings:
    """Compares one freedom after the other. Every method is called by every rank and has the same result on all.

    Args:
        bench: where cases run.
        samples: the micro-batches.

    Attributes:
        messages: a paragraph for each freedom that has to be switched off.
    """

    def __init__(self, bench: Bench, samples: Samples) -> None:
        self.messages: list[str] = []
        self._bench = bench
        self._samples = samples
        self._ids = samples.pair.sample_ids
        self._tolerance = FLOAT32
        self._reference = Result()
        self._together = Result()
        self._padding = True
        self._random: bool | None = None
        self._unsharded: dict[tuple[Row, ...], Result] = {}
        self._valid: dict[int, tuple[tuple[Row, ...], Result]] = {}

    def usable(self) -> bool:
        """Run each sample alone, unpadded, on one rank: what all else is compared with.

        Raises:
            PlainRunError: that is not possible.
        """
        case = Case(rows=self._samples.singles)
        seen: list[torch.dtype] = []
        reference = self._bench.run(case, half_precision(seen))
        if reference.problems:
            # Code that insists on half precision is compared within its rounding.
            self._bench.upcast = False
            reference = self._bench.run(case, half_precision(seen))
        if reference.problems:
            raise PlainRunError(
                f"Self-check: samples {self._ids} fail one by one on one rank, neither padded nor recomputed: "
                f"{'; '.join(reference.problems)}"
            )
        self._reference = reference
        self._valid = {1: (case.rows, reference)}
        self._tolerance = tolerance_for([dtype for dtypes in self._bench.everyone(seen) for dtype in dtypes])
        nothing = self._nothing()
        if nothing:
            self._say(f"Self-check: nothing could be checked, since {nothing}", advice.NOTHING)
        return not nothing

    def padding(self) -> bool:
        """Whether one padded micro-batch of both samples computes the same as each of them alone."""
        pair = self._samples.pair
        self._together = self._bench.run(Case(rows=(pair,)))
        fault = self._fault(self._together, self._reference)
        if not fault or self._depends_on_seed():
            return True
        self._padding = False
        self._say(
            f"Self-check, padding: samples {self._ids} in one micro-batch instead of one each: this {fault}",
            "" if self._together.raised else self._naming().padding(),
            "From now on micro-batches hold samples of one shape, without padding",
            advice.PADDING,
        )
        return False

    def sharding(self) -> tuple[int, ...]:
        """Sequence-parallel sizes that compute the same as one rank; after :meth:`padding`."""
        sizes = self._bench.world.sp_sizes[1:]
        if not sizes or self._random:
            return (1,)
        faults: list[str] = []
        for size in sizes:
            rows = self._sharded_rows(size)
            result = self._bench.run(Case(rows=rows, sp_size=size))
            fault = self._fault(result, self._whole(rows))
            if not fault:
                self._valid[size] = (rows, result)
            elif self._depends_on_seed():
                self._valid = {1: self._valid[1]}
                return (1,)
            else:
                faults.append(f"{size} ranks instead of one: this {fault}")
                faults.append("" if result.raised else self._naming().sharding(rows, size))
        allowed = tuple(sorted(self._valid))
        if faults:
            faults[0] = f"Self-check, sequence-parallel size: samples {self._ids} on {faults[0]}"
            self._say(*faults, f"From now on sp_size is one of {list(allowed)}", advice.SHARDING)
        return allowed

    def recompute(self) -> bool:
        """Whether all layers recomputed compute the same as none, at every size that is left; after the others."""
        layers = self._bench.num_layers
        for size, (rows, plain) in sorted(self._valid.items()) if any(layers) else ():
            result = self._bench.run(Case(rows=rows, sp_size=size, recompute=layers))
            fault = self._fault(result, plain)
            if fault:
                self._say(
                    f"Self-check, recompute: all layers recomputed instead of none at p = {size}: this {fault}",
                    "" if result.raised else self._naming().recompute(rows, size),
                    "From now on no layer is recomputed",
                    advice.RECOMPUTE,
                )
                return False
        return True

    def _naming(self) -> Naming:
        return Naming(self._bench, self._samples, self._tolerance.output)

    def _say(self, *sentences: str) -> None:
        self.messages.append(" ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence))

    def _nothing(self) -> str:
        """Why the reference cannot be compared with; empty if it can."""
        reference = self._reference
        if reference.count <= 0:
            return f"samples {self._ids} have no item of the loss (no valid label)"
        norm = total_norm(self._bench, reference)
        if not math.isfinite(norm) or not math.isfinite(reference.loss):
            return f"loss {reference.loss:g} or gradient norm {norm:g} of samples {self._ids} is not finite"
        return f"the gradient of samples {self._ids} is exactly zero" if norm == 0 else ""

    def _fault(self, result: Result, reference: Result) -> str:
        """What is wrong with a result, as the rest of a sentence; empty if nothing is."""
        if result.problems:
            more = f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
            return f"is not possible, since {result.problems[0]}{more}"
        if reference.problems:
            return f"cannot be compared, since {reference.problems[0]}"
        return difference(self._bench, result, reference, self._tolerance)

    def _depends_on_seed(self) -> bool:
        """Whether training_step draws numbers that the plan changes; then only recompute can be compared."""
        if self._random is None:
            again = self._bench.run(Case(rows=self._samples.singles, step=1))
            self._random = bool(self._fault(again, self._reference))
            if self._random:
                self._say(
                    "Self-check: the gradient changes with the random seed although dropout is off",
                    self._naming().randomness(),
                    "Padding could not be checked, and from now on sp_size is 1, since each rank of a group would "
                    "draw numbers of its own",
                    advice.RANDOMNESS,
                )
        return self._random

    def _sharded_rows(self, size: int) -> tuple[Row, ...]:
        """Micro-batches for the comparison of a size with one rank, like those that plans may hold."""
        if self._padding:
            # The short sample alone, much padded, leaves some shards without any item.
            return (self._samples.pair, self._samples.padded_singles[0])
        unpadded = tuple(row for row in self._samples.singles if row.padded_shape[0] % size == 0)
        if unpadded:
            return unpadded
        # Padded on both sides: what padding does to them is the same.
        return self._samples.padded_singles if self._together.problems else (self._samples.pair,)

    def _whole(self, rows: tuple[Row, ...]) -> Result:
        """The same micro-batches on one rank."""
        if rows not in self._unsharded:
            self._unsharded[rows] = self._bench.run(Case(rows=rows))
        return self._unsharded[rows]
