"""How many bytes a rank may use."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from lightning_dcp.amounts import parse_bytes

DEFAULT_BUCKET = 200_000_000
"""Elements of Lightning's default reduce bucket; the strategy lowers it to the number of parameters."""


def memory_bytes(limit: float | int | str, device: torch.device, ranks_per_node: int) -> int:
    """Bytes that a rank may use, from a share of its device or an amount.

    Args:
        limit: a share in ``(0, 1]`` of the device's memory (on CPU: of this rank's part of the main memory), or an
            amount such as ``"80GB"`` or ``"512 MiB"``.
        device: device of the rank.
        ranks_per_node: ranks that share the main memory.

    Raises:
        ValueError: the limit is neither.
    """
    if isinstance(limit, str):
        return parse_bytes(limit)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= 1:
        raise ValueError(
            f"memory_limit is {limit!r}; allowed are a share of the device's memory above 0 and up to 1, or an amount "
            'such as "80GB"'
        )
    return int(limit * _total(device, ranks_per_node))


def least_of_all(amount: int, device: torch.device) -> int:
    """The smallest amount of all ranks, by one all-reduce over the world (none without process groups).

    Machines of one kind differ by some megabytes, and what plans or probes depend on must be the same everywhere.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return amount
    vector = torch.tensor([amount], dtype=torch.int64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MIN)
    return int(vector.item())


def _total(device: torch.device, ranks_per_node: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
