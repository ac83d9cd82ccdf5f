"""Shared fixtures: the two pools of gloo workers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers for tests of two to six ranks; one is started for each rank that a test asks for."""
    workers = Pool(6)
    yield workers
    workers.close()
