"""The process groups of a run: the only place in the project that calls ``torch.distributed.new_group``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_dcp.plan import PlanError
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.topology import Block


class ProcessGroups:
    """All sequence-parallel groups that plans may use, created once.

    A communicator costs device memory for the life of the process, so plans change which groups work, never which
    exist. The blocks are a laminar family: fewer than ``2 W`` of them.

    Args:
        blocks: ``(first_rank, sp_size)`` of every group, in an order that is the same on all ranks. Doubles and
            blocks of one rank need no process group.
        timeout: limit for a collective of these groups; ``None`` takes the backend's default.

    Raises:
        RuntimeError: a block has more than one rank but ``torch.distributed`` is not initialised.
        PlanError: a block leaves the world.
    """

    def __init__(self, blocks: Sequence[Block], *, timeout: timedelta | None = None) -> None:
        wide = [block for block in dict.fromkeys(blocks) if block[1] > 1]
        initialised = dist.is_available() and dist.is_initialized()
        if wide and not initialised:
            raise RuntimeError(
                f"groups {wide} need torch.distributed, which is not initialised; "
                "call init_process_group first or use blocks of one rank"
            )
        self._rank: int = dist.get_rank() if initialised else 0
        world_size = dist.get_world_size() if initialised else 1
        for first, size in blocks:
            if first < 0 or size < 1 or first + size > world_size:
                raise PlanError(f"group {first}..{first + size - 1} leaves the world of {world_size} ranks")
        local = bool(wide) and _may_synchronise_locally()
        self._groups: dict[Block, SPGroup] = {(self._rank, 1): SPGroup(ranks=(self._rank,))}
        for block in wide:
            self._create(block, timeout, local)

    def _create(self, block: Block, timeout: timedelta | None, local: bool) -> None:
        first, size = block
        ranks = tuple(range(first, first + size))
        handle = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=local)
        if self._rank in ranks:
            self._groups[block] = SPGroup(ranks=ranks, rank=self._rank - first, handle=handle)

    @property
    def num_created(self) -> int:
        """Process groups that this rank is a member of; constant after construction."""
        return sum(group.handle is not None for group in self._groups.values())

    def of(self, first_rank: int, sp_size: int) -> SPGroup:
        """The group ``first_rank .. first_rank + sp_size - 1`` as seen from this rank.

        Raises:
            PlanError: no such group was created, or this rank is no member.
        """
        try:
            return self._groups[first_rank, sp_size]
        except KeyError:
            own = ", ".join(f"{first}..{first + size - 1}" for first, size in sorted(self._groups))
            raise PlanError(
                f"rank {self._rank} is in no group {first_rank}..{first_rank + sp_size - 1}; its groups are {own}"
            ) from None


def _may_synchronise_locally() -> bool:
    """Whether members may create a group without the other ranks.

    A default group that is bound to a device makes new NCCL communicators by splitting its own, a collective of
    the whole world; MPI has no partial synchronisation.
    """
    return getattr(dist.group.WORLD, "bound_device_id", None) is None and dist.get_backend() != dist.Backend.MPI
