"""Whether the ranks have read the same checkpoint: a file of a node's own disk may be older than another node's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.checkpoint.section import Section


def check_same(checkpoint: Mapping[str, Any], world_size: int, path: Any) -> None:
    """Compare steps, the run's own section and a few bytes of each weight; one small gather, called by every rank.

    Raises:
        MisconfigurationException: on every rank, with the steps that the ranks have read.
    """
    if world_size == 1:
        return
    everyone = of_all_ranks((_digest(checkpoint), checkpoint.get("global_step")), world_size)
    if any(digest != everyone[0][0] for digest, _ in everyone):
        found: dict[Any, list[int]] = {}
        for rank, key in enumerate(everyone):
            found.setdefault(key, []).append(rank)
        read = "; ".join(f"ranks {ranks} one of step {step}" for (_, step), ranks in found.items())
        raise MisconfigurationException(
            f"the ranks have read different checkpoints from {path}: {read}. Only rank 0 writes them; resume from a "
            "path that all nodes share, or copy the file to every node"
        )


def _digest(checkpoint: Mapping[str, Any]) -> str:
    section = checkpoint.get(Section.KEY)
    own = {key: value for key, value in section.items() if key != "random"} if isinstance(section, dict) else None
    weights = checkpoint.get("state_dict")
    items = weights.items() if isinstance(weights, Mapping) else ()
    # One element of each: the file is mapped into memory, and the rest of it need not be read for this.
    seen = [(name, tuple(value.shape), _first(value)) for name, value in items if isinstance(value, Tensor)]
    text = repr((checkpoint.get("epoch"), checkpoint.get("global_step"), own, seen))
    return hashlib.sha256(text.encode()).hexdigest()


def _first(value: Tensor) -> Any:
    plain = value.layout == torch.strided and not value.is_quantized and value.numel() > 0
    return value[(0,) * value.dim()].item() if plain else None
