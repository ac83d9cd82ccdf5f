"""Shared fixtures: the two pools of gloo workers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import Pool

# The same examples in every run, and no limit of time for one of them.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile("seeded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of several ranks, which ``make test`` runs beside the others."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("launch"):
            item.add_marker("ranks")


@pytest.fixture(autouse=True)
def _own_rank() -> Iterator[None]:
    """Take back the rank that a SLURM environment gives this process: other ranks than 0 do not warn."""
    rank = getattr(rank_zero_only, "rank", 0)
    yield
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers for tests of two to six ranks; one is started for each rank that a test asks for."""
    workers = Pool(6)
    yield workers
    workers.close()
