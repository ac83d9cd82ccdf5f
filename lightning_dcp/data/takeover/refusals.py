"""Train loaders that no plan can be made for: what was got, what is allowed, what to do."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.takeover.frames import unframed
from lightning_dcp.data.takeover.ordering import given_of

_NEEDED = "DCPStrategy plans steps by the lengths of the samples, which it has to know and to choose from"


def check_given(loaders: Any) -> None:
    """Refuse train loaders by what can be seen of them without reading a sample; a user's sampler draws an epoch.

    Args:
        loaders: what the user gave to ``trainer.fit``, or his hook returned.

    Raises:
        MisconfigurationException: with what was got, what is allowed and what to do.
    """
    found, _ = unframed(loaders)
    if len(found) != 1:
        raise MisconfigurationException(
            f"DCPStrategy got {len(found)} train loaders; allowed is one, since a step is planned as a whole. Put the "
            "datasets into one torch.utils.data.ConcatDataset, and mix them by a WeightedRandomSampler where they "
            "should not come in proportion to their sizes"
        )
    reason = _reason(found[0])
    if reason is not None:
        raise MisconfigurationException(f"{reason}. {_NEEDED}")


def _reason(loader: Any) -> str | None:
    if isinstance(loader, DCPLoader):
        return None
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return (
            f"DCPStrategy got no DCPLoader for training but a {kind.__name__}; allowed is a torch DataLoader over a "
            "dataset with __len__ and __getitem__, or a lightning_dcp.DCPDataModule that sets self.train_dataset"
        )
    # torchdata's own loader overrides it to keep its state; that of the samples is kept here.
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        return (
            f"{kind.__name__} makes its batches in an __iter__ of its own, which planned steps do not call; allowed is "
            "a plain torch DataLoader. Move the work into the dataset, the sampler or collate_fn"
        )
    return _reason_of_data(loader) or _reason_of_batches(loader) or _reason_of_order(loader)


def _reason_of_data(loader: DataLoader[Any]) -> str | None:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return (
            f"the train dataset {name} is an IterableDataset, whose samples come in an order of their own and cannot "
            "be chosen; allowed is a dataset with __len__ and __getitem__. Read the samples by their position, or "
            "gather several datasets in a ConcatDataset"
        )
    if not hasattr(dataset, "__getitem__"):
        return f"the train dataset {name} has no __getitem__; allowed is a dataset with __len__ and __getitem__"
    if not hasattr(dataset, "__len__"):
        return (
            f"the train dataset {name} has no length; allowed is a dataset with __len__ and __getitem__. Give it "
            "__len__, the number of its samples"
        )
    return None


def _reason_of_batches(loader: DataLoader[Any]) -> str | None:
    if loader.batch_sampler is not None:
        return None
    if isinstance(loader.sampler, BatchSampler):
        return (
            f"DataLoader(sampler={type(loader.sampler).__name__}(...), batch_size=None) hands whole batches of "
            "positions to the dataset; allowed is batch_sampler=, and a dataset that gives one sample for one position"
        )
    return (
        "DataLoader(batch_size=None) gives what the dataset returns as a batch; allowed is a batch_size (of each rank) "
        "and a dataset that gives one sample for one position"
    )


def _reason_of_order(loader: DataLoader[Any]) -> str | None:
    try:
        given_of(loader, world_size=1)
    except ValueError as error:
        return str(error)
    return None
