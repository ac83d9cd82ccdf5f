"""The checkpoint on disk: one file that appears whole or not at all, and is read without being copied."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_dcp.checkpoint.temporary import replaced


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's file format, written straight to disk.

    A local file is written beside its place under the name ``.NAME.RANDOM.part``, flushed to the disk and renamed, so
    that whoever reads it, after a kill or a power cut too, finds the old file or the new one, each whole. Nothing
    is serialised in memory first. Reading maps the file into memory: the ranks of a node share its pages, and
    only what is used is read. Other places than the local file system are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; called by rank 0.

        Raises:
            OSError: the file could not be written; the one that was there before is left.
        """
        place = _local(path)
        if place is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced(place) as part:
            torch.save(checkpoint, part)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; the tensors of a local file are read from it when they are used.

        Raises:
            FileNotFoundError: there is no such file.
            MisconfigurationException: a folder, or no whole file.
        """
        place = _local(path)
        if place is not None and place.is_dir():
            raise MisconfigurationException(
                f"{place} is a folder, as DeepSpeed writes it; allowed is a checkpoint in one file. For the weights "
                "alone call lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict on the "
                "folder, then load_from_checkpoint on the file that it writes"
            )
        if place is None:
            return super().load_checkpoint(path, map_location, weights_only)
        if not place.exists():
            raise FileNotFoundError(f"there is no checkpoint {place}")
        try:
            mapped: dict[str, Any] = torch.load(
                place, map_location=map_location, weights_only=weights_only, mmap=_is_archive(place)
            )
        except (RuntimeError, EOFError, OSError, LookupError, UnpicklingError) as error:
            # What torch gives for a file whose end is missing, and for one of another kind.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            # A whole archive with values that weights_only refuses: torch's message says which, and what to do.
            if isinstance(error, LookupError | UnpicklingError) and _is_archive(place):
                raise
            raise MisconfigurationException(
                f"{place} is no whole checkpoint ({error}); it was cut off, or is something else. Resume from another"
            ) from error
        if not isinstance(mapped, dict):
            raise MisconfigurationException(
                f"{place} holds one {type(mapped).__name__} and no checkpoint; allowed is what trainer.save_checkpoint "
                "wrote"
            )
        return mapped


def _is_archive(path: Path) -> bool:
    """Whether a file is in torch's format of today, which alone can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _local(path: Any) -> Path | None:
    """The path on the local file system, or ``None`` for another place."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None
