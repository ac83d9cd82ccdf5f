"""Random numbers of the data side: they depend on the sample and the epoch, never on a worker or a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated() -> Iterator[None]:
    """Give the global generators of torch (CPU), NumPy and ``random`` their state back afterwards."""
    # torch's CPU generator alone: a dataset has no business on the device, and a forked worker must not touch it.
    state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


def seed_global(seed: int) -> None:
    """Seed the three global generators.

    Args:
        seed: 63 bits, as :func:`lightning_dcp.seeding.seed_from` gives them.
    """
    torch.default_generator.manual_seed(seed)
    # One word more than random.seed takes: both are the same generator, and equal seeds would give equal numbers.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    random.seed(seed)
