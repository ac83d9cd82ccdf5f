"""What an evaluation takes from a ``DCPDataModule``, and what it misses there."""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.upstream import overrides_val


def seed_of(trainer: pl.Trainer) -> int:
    """Of the data module, else of ``seed_everything``."""
    datamodule = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, DCPDataModule):
        return datamodule.seed
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def warn_of_validation(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What Lightning says of a missing step or loader, now that the data module was set up."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, DCPDataModule) or overrides_val(data):
        return
    has_step = is_overridden("validation_step", module)
    if data.val_dataset is not None and not has_step:
        rank_zero_warn(
            f"{type(data).__name__} has a val_dataset, but {type(module).__name__} has no validation_step; nothing is "
            "validated"
        )
    if data.val_dataset is None and has_step:
        rank_zero_warn(
            f"{type(module).__name__} has a validation_step, but {type(data).__name__} has no val_dataset; nothing is "
            "validated"
        )
