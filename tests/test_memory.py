"""How many bytes a rank may use: amounts, shares, and one number for all ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.memory import least_of_all, memory_bytes
from lightning_dcp.preparation import Settings, Site, limits_of
from lightning_dcp.selfcheck import Freedoms
from tests.pool import Pool

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("80GB", 80 * 10**9), ("512 MiB", 2**29), (" 1.5gib ", 3 * 2**29), ("7B", 7), ("2tb", 2 * 10**12)],
)
def test_amounts(text: str, amount: int) -> None:
    assert memory_bytes(text, CPU, 4) == amount


def test_shares_of_the_main_memory() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(1, CPU, 1) == whole
    assert memory_bytes(0.5, CPU, 2) == whole // 2 // 2


@pytest.mark.parametrize(
    "limit", ["80", "GB", "-1GB", "0GB", "0.1B", "1e3GB", "2000TB", 0, -0.5, 1.1, True, float("nan")]
)
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r'memory_limit is .*"80GB"'):
        memory_bytes(limit, CPU, 1)


def limit_of_plans() -> tuple[int, int]:
    """On a machine whose second rank has less memory."""
    freedoms = Freedoms(exact_shapes=False, sp_sizes=(1, 2), recompute=True)
    site = Site(rank=dist.get_rank(), world_size=2, ranks_per_node=1, device=CPU, precision="32-true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 1000 - 10 * dist.get_rank() if name == "SC_PHYS_PAGES" else 100)
        return limits_of(Settings(memory_limit=0.5), site, freedoms).memory_bytes, memory_bytes(0.5, CPU, 1)


def test_plans_use_the_least_memory_of_all_ranks(pool: Pool) -> None:
    """Machines of one kind differ by some megabytes; ranks with limits of their own would make different plans."""
    assert pool.run(limit_of_plans, 2) == [(49_500, 50_000), (49_500, 49_500)]
    assert least_of_all(7, CPU) == 7
