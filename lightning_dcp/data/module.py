"""The data module that users subclass: set the datasets in ``setup``; override a hook only where needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.checks import check_batch_size, check_integer
from lightning_dcp.data.collate import MASK, CollateRules, collate, detect_sequence_axes
from lightning_dcp.data.evaluation import EvaluationCollate, IndexedDataset
from lightning_dcp.data.leaving import TooLong
from lightning_dcp.data.lengths import Lengths, check_shapes, dataset_size, known_shapes, read_shapes
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.own_order import OwnSampler, given_by
from lightning_dcp.data.position import LoaderKeeper, is_fitting, planner_of
from lightning_dcp.data.reading import LoaderOptions
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.plan import MicroBatch
from lightning_dcp.sequence_parallel.context import SPGroup, current
from lightning_dcp.sequence_parallel.sharding import shard_batch


class DCPDataModule(pl.LightningDataModule):
    """Feeds ``DCPStrategy``: each optimizer step trains on the same samples whatever the number of ranks.

    Subclass it and set ``train_dataset`` (``val_dataset``, ``test_dataset``, ``predict_dataset``) in ``setup``. A
    dataset has ``__len__`` and ``__getitem__``, and its samples are dicts of tensors, arrays, lists, numbers and
    strings, or bare one-dimensional tensors. Override :meth:`sample_shapes`, :meth:`collate`, :meth:`shard` and
    :meth:`loss_items` only where the default does not fit.

    Args:
        global_batch_size: samples of an optimizer step, over all ranks. The last step of an epoch may be shorter.
        global_batch_tokens: tokens of an optimizer step instead: it ends before it passes them, and holds at least
            one sample. The number of steps then differs between epochs, so ``len`` of the loader is unknown. Both are
            left out for a planner that draws the samples of a step by itself; ``floating`` takes half and twice of
            ``global_batch_size`` as its bounds where it has none.
        eval_batch_size: samples of a batch in validation, test and prediction, per rank.
        shuffle: a new order in each epoch.
        sampler: the order of the epochs instead: an iterable of positions in ``train_dataset`` (any torch ``Sampler``,
            also with repeats), or a function of the dataset that returns one. Numbers that it draws are seeded by
            (seed, epoch), and ``set_epoch`` is called where it has it.
        too_long: what becomes of samples that fit no setting: ``"raise"`` refuses them before the first step,
            ``"leave_out"`` leaves them out of every epoch and lists them in a file in ``default_root_dir``.
        seed: seed of the order and of the draws in ``__getitem__`` and collate; the same on all ranks.
        num_workers: processes that read samples, per rank.
        prefetch_steps: optimizer steps that are planned and read ahead by the workers.
        lengths: a column of the dataset, one length or shape per sample of ``train_dataset``, or a function of a
            dataset that returns them. By default they are looked up (see
            :func:`lightning_dcp.data.lengths.read_shapes`).
        sequence_dims: key to the axis of the batched tensor along which its sequence runs, or ``None`` for a value
            that is no sequence. Keys that are not named are sequences (axis 1) when their leading axes equal the
            sample's length.
        pad_values: key to the value that fills its padding; by default ``ignore_index`` for the labels, else 0.
        pin_memory: copy batches to page-locked memory.
        shift_labels: make next-token labels, on the whole sequence.
        labels_key: key of the labels.
        ignore_index: label of positions that do not count.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: start method of the workers.

    Raises:
        ValueError: both batch sizes are given, or a number is out of range. Where none is given and the planner needs
            one, an error says so when the planner is known.
    """

    def __init__(  # noqa: PLR0913
        self,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        *,
        eval_batch_size: int = 1,
        shuffle: bool = True,
        sampler: OwnSampler | None = None,
        too_long: TooLong = "raise",
        seed: int = 0,
        num_workers: int = 0,
        prefetch_steps: int = 2,
        lengths: Lengths | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
        pad_values: Mapping[str, float] | None = None,
        pin_memory: bool = False,
        shift_labels: bool = False,
        labels_key: str = "labels",
        ignore_index: int = -100,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        super().__init__()
        self.global_batch_size, self.global_batch_tokens = check_batch_size(global_batch_size, global_batch_tokens)
        self.eval_batch_size = check_integer("eval_batch_size", eval_batch_size, minimum=1)
        self.shuffle = shuffle
        self.seed = check_integer("seed", seed, minimum=0)
        self.lengths = lengths
        self.loader_options = LoaderOptions(
            num_workers=num_workers,
            prefetch_steps=prefetch_steps,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            too_long=too_long,
        )
        self.sampler = sampler
        self.sequence_dims = dict(sequence_dims or {})
        self.rules = CollateRules(
            pad_values=dict(pad_values or {}),
            sequence_dims=self.sequence_dims,
            shift_labels=shift_labels,
            labels_key=labels_key,
            ignore_index=ignore_index,
        )
        self.train_dataset: Any = None
        self.val_dataset: Any = None
        self.test_dataset: Any = None
        self.predict_dataset: Any = None
        self._keeper = LoaderKeeper()

    # ------------------------------------------------------------------ hooks to override

    def sample_shapes(self, dataset: Any) -> Any:
        """Size of every sample of a dataset: integers ``[n]`` or ``[n, axes]``.

        Override it where the lengths cannot be looked up. It is called for each dataset, on every rank.
        """
        return read_shapes(dataset, self._lengths_of(dataset))

    def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """Pad the samples of a micro-batch to ``micro_batch.padded_shape`` and stack them, unsharded.

        An override returns a dict of tensors ``[B, S, ...]`` along the sequence (or ``[B, ...]``) with
        ``S = micro_batch.padded_shape[0]``; its random numbers are the same on all ranks of a group.
        """
        return collate(samples, micro_batch, self.rules)

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        """Cut out what one rank of a group trains on: the ``S / p`` positions from ``group.rank * S / p`` on."""
        if group.size == 1:
            return batch
        padded_shape, mask = current().padded_shape, batch.get(MASK)
        if not padded_shape and not isinstance(mask, torch.Tensor):
            raise ValueError(
                f'outside of a micro-batch the length is that of "{MASK}", which the batch lacks; it has '
                f"{sorted(batch)}"
            )
        length = padded_shape[0] if padded_shape else int(batch[MASK].shape[1])
        whole = {key: None for key, axes in self.rules.sequence_axes.items() if axes == 0}
        return shard_batch(batch, group, sequence_length=length, sequence_dims={**whole, **self.sequence_dims})

    def loss_items(self, batch: Batch) -> int:
        """Items of a shard that ``training_step`` averages over: its valid labels, without labels its real tokens.

        Raises:
            ValueError: the batch has neither labels nor an attention mask.
        """
        labels = batch.get(self.rules.labels_key)
        if isinstance(labels, torch.Tensor):
            return int((labels != self.rules.ignore_index).sum())
        mask = batch.get(MASK)
        if isinstance(mask, torch.Tensor):
            return int((mask != 0).sum())
        raise ValueError(
            f'the batch has neither "{self.rules.labels_key}" nor "{MASK}", so the items of its loss are unknown; '
            f"it has {sorted(map(str, batch))}. Override loss_items"
        )

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> DCPLoader:
        """A loader of optimizer steps over ``train_dataset``.

        Raises:
            ValueError: the dataset is missing or empty, or its lengths are wrong.
        """
        dataset = self._required("train_dataset")
        waiting = self._keeper.waiting(dataset, self.trainer)
        if waiting is not None:
            return waiting
        size = dataset_size(dataset)
        shapes = check_shapes(self.sample_shapes(dataset), size)
        self.rules = replace(self.rules, sequence_axes=detect_sequence_axes(dataset, shapes, self.rules))
        in_order = bool(getattr(self.trainer, "overfit_batches", 0))
        sampler = StepSampler(
            shapes.prod(axis=1),
            seed=self.seed,
            shuffle=self.shuffle and not in_order,
            given=None if in_order else given_by(self.sampler, dataset, self.seed),
            global_batch_size=self.global_batch_size,
            global_batch_tokens=self.global_batch_tokens,
        )
        loader = DCPLoader(dataset, shapes=shapes, sampler=sampler, hooks=self, options=self.loader_options)
        planner = planner_of(self.trainer)
        if planner is not None:
            loader.announce(planner)
        self._keeper.adopt(loader, self.trainer)
        if not sampler.drawing:
            self._warn_if_small(size)
        return loader

    def val_dataloader(self) -> Any:
        """A loader over ``val_dataset``; none where it is not set and the run only trains."""
        if self.val_dataset is None and is_fitting(self.trainer):
            return []
        return self.evaluation_loader(self._required("val_dataset"))

    def test_dataloader(self) -> Any:
        """A loader over ``test_dataset``."""
        return self.evaluation_loader(self._required("test_dataset"))

    def predict_dataloader(self) -> Any:
        """A loader over ``predict_dataset``."""
        return self.evaluation_loader(self._required("predict_dataset"))

    def evaluation_loader(self, dataset: Any) -> DataLoader[Any]:
        """A loader of ``eval_batch_size`` samples at a time, collated as in training.

        For overrides of ``val_dataloader`` and the others that return several::

            return [self.evaluation_loader(self.easy), self.evaluation_loader(self.hard)]

        A plain ``DataLoader`` for every strategy; ``DCPStrategy`` reads it on groups of ranks, each sample once.

        Args:
            dataset: has ``__len__`` and ``__getitem__``.
        """
        size = dataset_size(dataset)
        shapes = self._cheap_shapes(dataset, size)
        trained = self._keeper.loader
        axes = trained.shapes.shape[1] if trained is not None else 1
        options = self.loader_options
        return DataLoader(
            IndexedDataset(dataset),
            batch_size=self.eval_batch_size,
            shuffle=False,
            num_workers=options.num_workers,
            collate_fn=EvaluationCollate(hooks=self, shapes=shapes, axes=axes),
            pin_memory=options.pin_memory,
            worker_init_fn=options.worker_init_fn,
            multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
            persistent_workers=options.num_workers > 0,
        )

    # ------------------------------------------------------------------ position in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last consumed step; empty before there is a train loader."""
        loader = self._keeper.loader
        return {"train_loader": loader.state_dict()} if loader is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a fit behind a saved position.

        Lightning hands the loader its own state only when nothing asked for the loader earlier (a schedule that
        reads ``estimated_stepping_batches`` does), so the data module carries it too.
        """
        if "train_loader" in state_dict and (self.trainer is None or is_fitting(self.trainer)):
            self._keeper.load_state_dict(state_dict["train_loader"])

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker needs: not the trainer, not the loader that owns the workers."""
        return {**self.__dict__, "trainer": None, "_keeper": LoaderKeeper()}

    # ------------------------------------------------------------------ inside

    def _required(self, name: str) -> Any:
        dataset = getattr(self, name)
        if dataset is None:
            raise ValueError(
                f"{type(self).__name__}.{name} is not set; assign a dataset to self.{name} in setup(stage)"
            )
        return dataset

    def _lengths_of(self, dataset: Any) -> Lengths | None:
        """A table of lengths belongs to the train dataset; a column or a function serves every dataset."""
        general = self.lengths is None or isinstance(self.lengths, str) or callable(self.lengths)
        return self.lengths if general or dataset is self.train_dataset else None

    def _warn_if_small(self, size: int) -> None:
        ranks = self.trainer.world_size if self.trainer is not None else 1
        samples = min(size, self.global_batch_size or size)
        if samples < ranks:
            rank_zero_warn(
                f"a step holds {samples} samples for {ranks} ranks; a rank without a sample only waits, unless "
                "long samples are split over several ranks. Raise global_batch_size or use fewer devices"
            )

    def _cheap_shapes(self, dataset: Any, size: int) -> IntArray | None:
        """Shapes that are known without reading the samples; else each batch measures its own."""
        overridden = type(self).sample_shapes is not DCPDataModule.sample_shapes
        known = self.sample_shapes(dataset) if overridden else known_shapes(dataset, self._lengths_of(dataset))
        return None if known is None else check_shapes(known, size)
