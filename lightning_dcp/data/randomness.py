"""Random numbers of the data side: they depend on the sample and the epoch, never on a worker or a rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_dcp.seeding import seed_from

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


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


@contextmanager
def reseeded(generators: Sequence[Any], seed: int) -> Iterator[None]:
    """Seed generators that somebody else owns, and give them their state back afterwards.

    Args:
        generators: objects of the kinds in :data:`GENERATORS`.
        seed: each gets one of its own that comes from this one.
    """
    states = [_state(generator) for generator in generators]
    try:
        for number, generator in enumerate(generators):
            _seed(generator, seed_from(seed, number))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _restore(generator, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        # RandomState takes 32 bits.
        generator.seed(seed & 0xFFFFFFFF)
