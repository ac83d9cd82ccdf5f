"""The configuration of a run, written beside its logs."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback

HEADER = "written by lightning-dcp"
"""First line of each file that is written; files without it belong to the user."""


class SaveConfig(SaveConfigCallback):
    """Writes the configuration on rank 0, and again in the place of one that an earlier run has written there.

    A file of this name that a user wrote (with ``logger: false`` the folder may be the working directory) stays: the
    configuration goes to ``config-1.yaml`` then, or the next number that is free.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the name, then write; called on every rank."""
        folder = trainer.log_dir  # a broadcast
        if trainer.is_global_zero and folder is not None and not self.already_saved:
            self.config_filename = _free_name(Path(folder), self.config_filename)
        super().setup(trainer, pl_module, stage)


def _free_name(folder: Path, name: str) -> str:
    """The name, or the first numbered one, of no file or of one that this command wrote."""
    stem, suffix = Path(name).stem, Path(name).suffix
    names = (name if number == 0 else f"{stem}-{number}{suffix}" for number in count())
    return next(found for found in names if _is_ours(folder / found))


def _is_ours(file: Path) -> bool:
    if not file.exists():
        return True
    try:
        with file.open(encoding="utf-8") as lines:
            return HEADER in lines.readline()
    except (OSError, UnicodeDecodeError):
        return False
