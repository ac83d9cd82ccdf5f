"""What ends every step whatever its plan, ``T_sync``: the reduction of the gradients and the optimizer's update.

Measured on buffers of the model's size; weights, gradients and optimizer states are not written to. In it, as
DeepSpeed's ZeRO-1 does them: gathering the gradients in buckets, dividing and all-reducing each bucket, copying the
rank's partition out, its norm, torch's AdamW on float32 master weights, and gathering the new weights.

Not in it: waiting for ranks that are still busy (the makespan has that), the two small all-reduces of the vote, an
update that costs more or less than AdamW's, clipping, callbacks, and DeepSpeed's own Python code around each
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_dcp.agreement import StepError
from lightning_dcp.memory import DEFAULT_BUCKET, least_of_all
from lightning_dcp.profiling.clock import Clock
from lightning_dcp.profiling.errors import is_out_of_memory

_RUNS = 3
_ENOUGH = 10_000_000_000
"""Nanoseconds after which no further run is made."""


def measure_step_end(module: nn.Module, world_size: int, device: torch.device, clock: Clock) -> int:
    """Nanoseconds of the end of a step: of three runs the middle one, each as long as on its slowest rank.

    Called by every rank. Collectives over the world: one all-reduce whether the memory suffices, and for each run those
    of the step's end, one before it, so that no rank waits inside, and one that agrees on the time. Takes four times
    as long as it measures, for a large model on a CPU less.

    Args:
        module: the model after ``deepspeed.initialize``, so in the dtype that it trains in.
        world_size: number of ranks ``W``.
        device: device of this rank.
        clock: tells the time of work that communicates.

    Returns:
        0 where nothing is trained, and where the buffers do not fit into memory (with a warning).

    Raises:
        StepError: another rank has raised an error; this one has none.
    """
    parameters = [p.detach() for p in module.parameters() if p.requires_grad]
    if not parameters:
        return 0
    end, error = None, None
    try:
        end = _StepEnd.build(parameters, world_size, device)
        end.rehearse()
    except Exception as raised:
        error = raised
    # Every rank comes here, whatever it met, so that none waits for one that has given up.
    fits = least_of_all(2 if error is None else int(is_out_of_memory(error)), device)
    if error is not None and not is_out_of_memory(error):
        raise error
    if fits == 0:
        raise StepError("the end of a step could not be measured: another rank has raised an error")
    if fits == 1 or end is None:
        rank_zero_warn(
            "The end of a step could not be measured: buffers of the size of gradients and optimizer states do not fit "
            "into memory. Plans count it as 0; training may run out of memory at its first step"
        )
        return 0
    times = [_agreed(end.run(clock), device)]
    # The first run only warms up, unless it was long enough to be all there is time for.
    while len(times) <= _RUNS and sum(times) < _ENOUGH:
        times.append(_agreed(end.run(clock), device))
    return median_low(times[1:] or times)


def _agreed(nanoseconds: int, device: torch.device) -> int:
    return -least_of_all(-nanoseconds, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepEnd:
    """Buffers of one rank.

    Attributes:
        parameters: the weights, which stand for their gradients and are only read.
        gathers: whether gradients lie on the parameters and are gathered in buckets; those of half precision are
            accumulated in one float32 buffer, reduced there and set to zero for the next step.
        bucket: where gradients are reduced, in the type that they are communicated in.
        gradient: the rank's partition of the gradients, ``[ceil(N / W)]``.
        optimizer: AdamW over a float32 partition of that size.
        part: the partition in the type of the weights.
        whole: all partitions of it, ``[W, ceil(N / W)]`` flat.
    """

    parameters: Sequence[Tensor]
    world_size: int
    gathers: bool
    bucket: Tensor
    gradient: Tensor
    optimizer: torch.optim.Optimizer
    part: Tensor
    whole: Tensor

    @classmethod
    def build(cls, parameters: Sequence[Tensor], world_size: int, device: torch.device) -> _StepEnd:
        number, dtype = sum(p.numel() for p in parameters), parameters[0].dtype
        size = -(-number // world_size)
        # Gradients of half precision are accumulated and communicated in float32 (see build_config).
        wide = torch.promote_types(dtype, torch.float32)
        master = nn.Parameter(torch.zeros(size, dtype=wide, device=device))
        master.grad = torch.zeros_like(master)
        optimizer = torch.optim.AdamW([master])
        # Its states exist from here on, so that what does not fit is known before any rank communicates.
        optimizer.step()
        return cls(
            parameters=parameters,
            world_size=world_size,
            gathers=wide == dtype,
            bucket=torch.zeros(min(DEFAULT_BUCKET, number), dtype=wide, device=device),
            gradient=torch.zeros(size, dtype=wide, device=device),
            optimizer=optimizer,
            part=torch.zeros(size, dtype=dtype, device=device),
            whole=torch.zeros(size * world_size, dtype=dtype, device=device),
        )

    @property
    def master(self) -> nn.Parameter:
        """The partition that the optimizer updates."""
        parameter: nn.Parameter = self.optimizer.param_groups[0]["params"][0]
        return parameter

    @torch.no_grad()
    def rehearse(self) -> None:
        """All that allocates in :meth:`run`, without communication: clones, and what AdamW makes for the moment."""
        if self.gathers:
            self.bucket.clone()
        self._update()

    @torch.no_grad()
    def run(self, clock: Clock) -> int:
        """Nanoseconds of one end of a step on this rank."""
        if self.world_size > 1:
            dist.all_reduce(self.bucket[:1])
        start = clock.mark()
        self._reduce_all()
        self._update()
        if self.world_size > 1:
            dist.all_gather_single(self.whole, self.part)
        return clock.nanoseconds(start, clock.mark())

    def _reduce_all(self) -> None:
        if not self.gathers:
            number = sum(p.numel() for p in self.parameters)
            for start in range(0, number, len(self.bucket)):
                self._reduce(min(len(self.bucket), number - start))
            return
        filled = 0
        for parameter in self.parameters:
            for piece in torch.split(parameter.reshape(-1), len(self.bucket)):
                if filled + len(piece) > len(self.bucket):
                    self._reduce(filled)
                    filled = 0
                self.bucket[filled : filled + len(piece)].copy_(piece)
                filled += len(piece)
        self._reduce(filled)

    def _reduce(self, filled: int) -> None:
        """One bucket; where gradients are gathered in it, flattened anew, and the rank's share of it copied out."""
        bucket = self.bucket[:filled].div_(self.world_size)
        flat = bucket.clone() if self.gathers else bucket
        if self.world_size > 1:
            dist.all_reduce(flat)
        if self.gathers:
            share = min(-(-filled // self.world_size), len(self.gradient))
            bucket[:share].copy_(flat[:share])
            self.gradient[:share].copy_(bucket[:share])

    def _update(self) -> None:
        self.master.grad = self.gradient.clone() if self.gathers else self.gradient
        norm = float(torch.linalg.vector_norm(self.master.grad))
        if self.gathers:
            self.master.grad.mul_(1.0 / max(1.0, norm))
        self.optimizer.step()
        self.part.copy_(self.master)
        if not self.gathers:
            for _ in range(0, sum(p.numel() for p in self.parameters), len(self.bucket)):
                self.bucket.zero_()
