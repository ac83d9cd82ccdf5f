"""Where the Trainer's loops get their loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dcp.data.evaluation import EvaluationLoader
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.upstream.evaluation import evaluation_loops


def train_loader(trainer: pl.Trainer) -> DCPLoader | None:
    """The train loader before the Trainer asks for it; ``DCPDataModule`` gives the same object again then."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() else None
    return loader if isinstance(loader, DCPLoader) else None


Convert = Callable[[Callable[[], Any], str], Any]


class _ConvertedSource(_DataLoaderSource):
    """Where a loop of the Trainer gets its loaders, with a conversion behind it."""

    def __init__(self, source: _DataLoaderSource, convert: Convert) -> None:
        super().__init__(source.instance, source.name)
        self.convert = convert

    def dataloader(self) -> Any:
        """What the user gave or a hook returned, converted."""
        return self.convert(super().dataloader, self.name)

    def is_defined(self) -> bool:
        """Whether there are loaders, as far as that is known before the data module was set up.

        Every ``DCPDataModule`` has a ``val_dataloader``, which is no reason for the Trainer to miss a
        ``validation_step``; where a dataset is set, the strategy says so later.
        """
        module = self.instance
        if self.name != "val_dataloader" or not isinstance(module, DCPDataModule) or overrides_val(module):
            return super().is_defined()
        trainer = module.trainer
        return trainer is not None and is_overridden("validation_step", trainer.lightning_module)


def overrides_val(module: DCPDataModule) -> bool:
    """Whether a user's data module says itself what its validation loaders are."""
    return is_overridden("val_dataloader", module, parent=DCPDataModule)


def loaders_in(collection: Any, world_size: int) -> Any:
    """The loaders that a ``CombinedLoader`` holds; anything else as it is.

    Raises:
        MisconfigurationException: they are not gone through one after the other.
    """
    if not isinstance(collection, CombinedLoader):
        return collection
    if collection._mode != "sequential" and world_size > 1:
        raise MisconfigurationException(
            f"evaluation over CombinedLoader(mode={collection._mode!r}) on {world_size} ranks: only "
            'mode="sequential" is allowed, since each sample is evaluated on one rank and batches of several loaders '
            "would be cut in different places. Give a list of loaders, or use one device"
        )
    return collection.iterables if collection._mode == "sequential" else collection


def record_indices(loader: EvaluationLoader) -> None:
    """Let prediction writers see the indices: the Trainer reads them from a wrapper of its own class only."""
    loader.batch_sampler = _IndexBatchSamplerWrapper(loader.batch_sampler)


def convert_loaders(trainer: pl.Trainer, convert: Convert) -> None:
    """Put a conversion between the user's loaders and the Trainer's loops, for as long as the trainer lives.

    ``process_dataloader`` of a strategy would come too late: the Trainer has put a ``DistributedSampler`` in by then,
    which gives some samples twice.

    Args:
        trainer: with its data attached.
        convert: gets a function that asks for what the user gave or the hook returns, a loader or a collection of
            them, and the name of the hook (``"train_dataloader"``, ``"val_dataloader"``, ``"test_dataloader"``,
            ``"predict_dataloader"``).
    """
    for loop in (trainer.fit_loop, *evaluation_loops(trainer), trainer.predict_loop):
        source = loop._data_source
        if isinstance(source, _ConvertedSource):
            source.convert = convert
        else:
            loop._data_source = _ConvertedSource(source, convert)


def check_given_loaders(trainer: pl.Trainer, check: Callable[[Any], None]) -> None:
    """Check the train loaders that were given to ``trainer.fit``; a hook may need ``setup``, which comes later.

    Args:
        trainer: with its data attached.
        check: gets the loaders.
    """
    source = trainer.fit_loop._data_source
    if trainer.state.fn == TrainerFn.FITTING and source.is_defined() and not source.is_module():
        check(source.instance)


def forget_train_loader(trainer: pl.Trainer) -> None:
    """Let the fit loop ask again for its loader, and for the number of its steps, before it begins."""
    trainer.fit_loop._combined_loader = None
