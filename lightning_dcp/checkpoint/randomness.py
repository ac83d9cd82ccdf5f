"""The global random numbers of a rank between steps: those of a step follow from the seed, its samples and its rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The generators of torch, of this rank's CUDA device, of NumPy and of ``random``, as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Tensors and numbers only, so that torch.load(weights_only=True) reads them.
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(_plain, rest)],
        "python": [version, torch.tensor(internal, dtype=torch.int64), following],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on with the numbers behind :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal.tolist()), following))
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state["cuda"])


def _plain(value: Any) -> float | int:
    return float(value) if isinstance(value, float) else int(value)
