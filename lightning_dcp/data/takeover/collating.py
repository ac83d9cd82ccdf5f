"""Batches of a user's loader: made by his collate_fn, or padded here where torch's default cannot stack them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dcp.data.collate import MASK, POSITIONS, CollateRules, collate
from lightning_dcp.data.lengths import SEQUENCE_KEY
from lightning_dcp.data.takeover.frames import framed
from lightning_dcp.plan import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCollate:
    """Collates the samples of a micro-batch as the user's loader would, and makes sequences divisible at p > 1.

    Attributes:
        collate_fn: the user's; torch's default stands for the padding collate where samples are dicts or bare
            sequences.
        rules: of the padding collate, and what fills a user's batches that are padded further.
        lengths_differ: whether samples of the dataset differ in length, so that batches need a mask.
        frame: the collection around the loader, see :mod:`lightning_dcp.data.takeover.frames`.
    """

    collate_fn: Callable[[Any], Any]
    rules: CollateRules
    lengths_differ: bool
    frame: Any = None

    def __call__(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Any:
        """One batch, unsharded.

        Raises:
            ValueError: at p > 1, a batch is longer than planned, and what is too much is no padding.
        """
        batch = self._batch(samples, micro_batch)
        if micro_batch.sp_size > 1 and isinstance(batch, Mapping):
            batch = fitted(batch, micro_batch, self.rules)
        return framed(self.frame, batch) if self.frame is not None else batch

    def _batch(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Any:
        if self.collate_fn is not default_collate or not is_paddable(samples[0]):
            return self.collate_fn(list(samples))
        rows = [_as_default(sample) for sample in samples]
        batch = collate(rows, micro_batch, self.rules)
        given = samples[0] if isinstance(samples[0], Mapping) else {}
        padded = self.lengths_differ or any(shape != micro_batch.padded_shape for shape in micro_batch.shapes)
        for key, unwanted in ((POSITIONS, True), (MASK, not padded)):
            if unwanted and key not in given:
                batch.pop(key, None)
        bare = not isinstance(samples[0], Mapping) and not padded
        return batch[SEQUENCE_KEY] if bare else batch


def is_paddable(sample: Any) -> bool:
    """Whether samples are of a kind that the padding collate takes: dicts, or bare tensors of tokens."""
    return isinstance(sample, Mapping) or (isinstance(sample, Tensor) and sample.dim() > 0)


def _as_default(sample: Any) -> Any:
    """Fractions in double precision, as torch's default collate makes them."""
    if not isinstance(sample, Mapping):
        return sample
    return {
        key: torch.tensor(value, dtype=torch.float64) if type(value) is float else value
        for key, value in sample.items()
    }


def sequence_length(batch: Mapping[Any, Any]) -> int | None:
    """Length of a batch's sequences, axis 1; of tokens, mask or labels, else the one that most tensors have."""
    lengths = {k: int(v.shape[1]) for k, v in batch.items() if isinstance(v, Tensor) and v.dim() > 1}
    for key in (SEQUENCE_KEY, MASK, "labels"):
        if key in lengths:
            return lengths[key]
    values = list(lengths.values())
    return max(values, key=values.count) if values else None


def fitted(batch: Mapping[Any, Any], micro_batch: MicroBatch, rules: CollateRules) -> Any:
    """A batch of exactly the planned length, which the ranks of a group can divide.

    Raises:
        ValueError: it has to be cut and real positions would be lost.
    """
    length, wanted = sequence_length(batch), micro_batch.padded_shape[0]
    if length is None or length == wanted:
        return batch
    if length > wanted:
        _check_tail(batch, length, wanted, rules)
    changes = {
        key: _resized(value, wanted, _fill(str(key), rules))
        for key, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
    }
    return replaced(batch, changes)


def replaced(batch: Mapping[Any, Any], changes: Mapping[Any, Any]) -> Any:
    """A batch of the same kind with other values under some keys."""
    if isinstance(batch, MutableMapping):
        twin = copy.copy(batch)
        twin.update(changes)
        return twin
    return {**batch, **changes}


def _fill(key: str, rules: CollateRules) -> float:
    return rules.pad_value(key)


def _resized(value_BS: Tensor, length: int, fill: float) -> Tensor:
    if value_BS.shape[1] >= length:
        return value_BS[:, :length].contiguous()
    missing = length - value_BS.shape[1]
    return F.pad(value_BS, (0, 0) * (value_BS.dim() - 2) + (0, missing), value=fill)


def _check_tail(batch: Mapping[Any, Any], length: int, wanted: int, rules: CollateRules) -> None:
    mask, labels = batch.get(MASK), batch.get(rules.labels_key)
    real = None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        real = (mask[:, wanted:] != 0).any()
    elif isinstance(labels, Tensor) and labels.dim() > 1 and labels.shape[1] == length:
        real = (labels[:, wanted:] != rules.ignore_index).any()
    if real is None or bool(real):
        raise ValueError(
            f"collate_fn made a batch of length {length} of samples that are at most {wanted} long, and the rest is "
            "not known to be padding; at p > 1 batches have the planned length. Pad to the longest sample, on the "
            "right, and give an attention_mask, or set sp_sizes=[1]"
        )
