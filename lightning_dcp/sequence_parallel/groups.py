"""The process groups of a run: the only place in the project that calls ``torch.distributed.new_group``."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.plan import PlanError
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.topology import Block

_LEFT: Any = object()
"""In the place of the process group that a rank has left; using it raises, where ``None`` would mean the world."""


class ProcessGroups:
    """The sequence-parallel groups that plans may use; those of a size are created when it is first needed.

    A communicator costs device memory and seconds, so a size that no plan uses costs nothing, and a group lives
    until the end of the fit: plans change which groups work, never which exist. The blocks are a laminar family:
    fewer than ``2 W`` of them, and a rank is in at most one of each size.

    Args:
        blocks: ``(first_rank, sp_size)`` of every group, in an order that is the same on all ranks. Doubles and
            blocks of one rank need no process group.
        timeout: limit for a collective of these groups; ``None`` takes the backend's default.
        device: device of this rank, on which a new group makes its first exchange.

    Raises:
        RuntimeError: a block has more than one rank but ``torch.distributed`` is not initialised.
        PlanError: a block leaves the world.
    """

    def __init__(
        self, blocks: Sequence[Block], *, timeout: timedelta | None = None, device: torch.device | None = None
    ) -> None:
        self._blocks = [block for block in dict.fromkeys(blocks) if block[1] > 1]
        self._timeout = timeout
        self._device = device
        initialised = dist.is_available() and dist.is_initialized()
        if self._blocks and not initialised:
            raise RuntimeError(
                f"groups {self._blocks} need torch.distributed, which is not initialised; "
                "call init_process_group first or use blocks of one rank"
            )
        self._rank: int = dist.get_rank() if initialised else 0
        world_size = dist.get_world_size() if initialised else 1
        for first, size in blocks:
            if first < 0 or size < 1 or first + size > world_size:
                raise PlanError(f"group {first}..{first + size - 1} leaves the world of {world_size} ranks")
        self._groups: dict[Block, SPGroup] = {(self._rank, 1): SPGroup(ranks=(self._rank,))}
        self._ready: set[int] = {1}

    def ensure(self, sp_sizes: Iterable[int] | None = None) -> None:
        """Create the groups of these sizes that do not exist yet.

        Called by every rank with the same sizes, while no rank is inside a micro-batch. Costs nothing once they exist.

        Args:
            sp_sizes: sizes that are about to be used; ``None`` for all of the family.
        """
        wanted = {size for _, size in self._blocks} if sp_sizes is None else set(sp_sizes)
        missing = wanted - self._ready
        self._ready |= missing
        # In the order of the blocks, never of a set: all ranks create all groups in one order.
        for block in self._blocks:
            if block[1] in missing:
                self._create(block)

    def _create(self, block: Block) -> None:
        first, size = block
        ranks = tuple(range(first, first + size))
        # Not with use_local_synchronization, which spares the ranks outside a wait: members name such a group after
        # the number of groups that each is in. They wait for each other under different names where those differ
        # (three ranks, all three after the first two), and under a used name, with dead addresses behind it, in the
        # next fit. NCCL that is bound to a device needs all ranks anyway.
        handle = dist.new_group(list(ranks), timeout=self._timeout)
        if self._rank in ranks:
            self._groups[block] = SPGroup(ranks=ranks, rank=self._rank - first, handle=handle)
            # NCCL connects at the first exchange: here, rather than in a micro-batch whose time is measured.
            dist.all_reduce(torch.zeros(1, device=self._device), group=handle)

    @property
    def num_created(self) -> int:
        """Process groups made so far that this rank is a member of; constant once all sizes of the plans were seen."""
        return sum(group.handle is not None for group in self._groups.values())

    def of(self, first_rank: int, sp_size: int) -> SPGroup:
        """The group ``first_rank .. first_rank + sp_size - 1`` as seen from this rank.

        Raises:
            PlanError: the family has no such group, this rank is no member, or :meth:`ensure` was not called for it.
        """
        group = self._groups.get((first_rank, sp_size))
        if group is None:
            group = self.shape_of(first_rank, sp_size)
            raise PlanError(
                f"group {first_rank}..{first_rank + sp_size - 1} does not exist yet; all ranks have to call "
                f"ProcessGroups.ensure([{sp_size}]) before its first micro-batch"
            )
        return group

    def shape_of(self, first_rank: int, sp_size: int) -> SPGroup:
        """Like :meth:`of`, for rank and size alone: also before the group exists, and without its handle.

        Raises:
            PlanError: the family has no such group, or this rank is no member.
        """
        known = (first_rank, sp_size) in self._groups or (first_rank, sp_size) in self._blocks
        if not known or not first_rank <= self._rank < first_rank + sp_size:
            members = [b for b in self._blocks if b[0] <= self._rank < b[0] + b[1]]
            own = ", ".join(f"{first}..{first + size - 1}" for first, size in sorted([*members, (self._rank, 1)]))
            raise PlanError(
                f"rank {self._rank} is in no group {first_rank}..{first_rank + sp_size - 1}; its groups are {own}"
            )
        return SPGroup(ranks=tuple(range(first_rank, first_rank + sp_size)), rank=self._rank - first_rank)

    def leave(self, error: BaseException | None = None) -> None:
        """Close this rank's connections of all groups, after an error inside a micro-batch of one of them.

        The other members wait in an exchange, and gloo has no way to call them off; when a connection closes their call
        raises at once. No group can be used again. NCCL is told to give up its kernels on this rank.

        Args:
            error: its traceback must not keep the connections open. Whoever else still holds a group, like the graph
                of an exchange, holds no connection.
        """
        if error is not None:
            _let_go(error)
        for group in self._groups.values():
            handle = group.handle
            if handle is None or handle is _LEFT:
                continue
            object.__setattr__(group, "handle", _LEFT)
            if dist.get_backend(handle) == dist.Backend.NCCL:
                handle.abort()
            dist.destroy_process_group(handle)

    def close(self) -> None:
        """Destroy the groups, so that those of the next fit in this process do not come on top.

        Called by every rank after its last micro-batch, and not after an error: a rank may be inside an exchange.
        """
        for group in self._groups.values():
            if group.handle is not None and group.handle is not _LEFT:
                dist.destroy_process_group(group.handle)
        self._groups = {(self._rank, 1): SPGroup(ranks=(self._rank,))}
        self._ready = {1}


def _let_go(error: BaseException) -> None:
    """Clear the frames of torch.distributed in a traceback; they hold the process group of the call that raised."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            frame.clear()
    if error.__cause__ is not None:
        _let_go(error.__cause__)
