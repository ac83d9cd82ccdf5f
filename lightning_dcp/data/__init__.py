"""From samples to steps: sampler, loader, collate, data module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_dcp.data.batch import Batch, DCPBatch
    from lightning_dcp.data.loader import DCPLoader
    from lightning_dcp.data.module import DCPDataModule

__all__ = ["Batch", "DCPBatch", "DCPDataModule", "DCPLoader"]

_HOMES = {"Batch": "batch", "DCPBatch": "batch", "DCPDataModule": "module", "DCPLoader": "loader"}


def __getattr__(name: str) -> Any:
    # On demand: the value types of a batch are wanted where Lightning's slow import is not.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
