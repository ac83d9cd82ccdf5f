"""From samples to one padded batch: every value that runs along the sequence takes the same route.

Shapes: B samples, S padded length of the first axis; the second axis of two-dimensional samples is padded alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from numbers import Number
from typing import Any

import numpy as np
import torch

from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch
from lightning_dcp.data.lengths import SEQUENCE_KEY, shape_of
from lightning_dcp.data.randomness import isolated
from lightning_dcp.plan import MicroBatch, Shape

POSITIONS = "position_ids"
MASK = "attention_mask"

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateRules:
    """How the default collate treats the values of a sample.

    Attributes:
        pad_values: key to the value that fills its padding; other keys are filled with 0 (False).
        sequence_keys: keys that run along the sequence, with the number of the sample's axes that they have (1 for
            values per frame of a two-dimensional sample). ``None``: those whose leading axes equal the declared
            shape in every sample of the micro-batch.
        sequence_dims: key to the axis of the BATCHED tensor along which its sequence runs, where that is not 1.
        shift_labels: move the labels one to the left on the whole sequence, so that position ``i`` holds what
            comes after token ``i``. Without labels they are made from ``input_ids``.
        labels_key: key of the labels.
        ignore_index: label of padding and, when shifted, of the last token.
    """

    pad_values: Mapping[str, float] = field(default_factory=dict)
    sequence_keys: Mapping[str, int] | None = None
    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    shift_labels: bool = False
    labels_key: str = "labels"
    ignore_index: int = -100

    def pad_value(self, key: str) -> float:
        """What fills the padding of a key."""
        return self.pad_values.get(key, self.ignore_index if key == self.labels_key else 0)


def collate(samples: Sequence[Any], micro_batch: MicroBatch, rules: CollateRules) -> Batch:
    """Pad and stack the samples of a micro-batch.

    Values along the sequence become ``[B, S, ...]`` with ``S = micro_batch.padded_shape[0]``; numbers and other
    tensors of one shape become ``[B, ...]``; everything else becomes a list of B values. ``position_ids`` [B, S]
    int64 and ``attention_mask`` [B, S] (two-dimensional samples [B, S, P]) bool are added unless the samples
    have them.

    Args:
        samples: mappings of tensors, arrays, lists, numbers and strings; a bare tensor stands for ``input_ids``.
        micro_batch: whose samples they are, with their declared shapes.
        rules: see :class:`CollateRules`.

    Raises:
        ValueError: a sample's shape is not the declared one, samples have different keys, nothing runs along the
            sequence, or other tensors differ in shape. The sentence names the sample.
    """
    if micro_batch.packed:
        raise ValueError(
            "the default collate pads; override collate(samples, micro_batch) to pack samples in one row"
        )
    rows = [as_sample(sample) for sample in samples]
    _check_keys(rows, micro_batch.sample_ids)
    keys = rules.sequence_keys
    if keys is None:
        keys = common_keys(
            sequence_keys(r, shape, rules) for r, shape in zip(rows, micro_batch.shapes, strict=True)
        )
    _check_lengths(rows, micro_batch, keys, rules)
    if rules.shift_labels:
        keys = _shift(rows, keys, rules)
    batch: Batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        batch[key] = (
            _pad(key, values, keys[key], micro_batch, rules) if key in keys else _stack(key, values, micro_batch)
        )
    return _add_positions(batch, micro_batch)


def as_sample(sample: Any) -> Sample:
    """A sample as a fresh dict in which arrays and lists of numbers are tensors."""
    fields = sample if isinstance(sample, Mapping) else {SEQUENCE_KEY: sample}
    return {str(key): _as_tensor(value) for key, value in fields.items()}


def sequence_keys(sample: Sample, shape: Shape, rules: CollateRules) -> dict[str, int]:
    """Keys of one sample whose leading axes equal those of its shape, with the number of axes that do."""
    axes = {key: _axes_along(_sequence_first(key, value, rules), shape) for key, value in sample.items()}
    return {key: count for key, count in axes.items() if count}


def common_keys(found: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Keys that run along the sequence in all of several samples, with the axes that they have in all."""
    first, *others = found
    return {
        key: min(count, *(o[key] for o in others)) if others else count
        for key, count in first.items()
        if all(key in o for o in others)
    }


def detect_sequence_keys(dataset: Any, shapes: IntArray, rules: CollateRules) -> dict[str, int] | None:
    """Keys that run along the sequence, told from the samples of the least and the greatest size of each axis.

    A vector with as many elements as ONE sample has tokens is no sequence; samples of different length tell them
    apart. ``None`` where all samples are equally long, so that each micro-batch has to decide by itself.
    """
    if shapes[:, 0].min() == shapes[:, 0].max():
        return None
    ends = sorted({int(i) for axis in shapes.T for i in (axis.argmin(), axis.argmax())})
    try:
        with isolated():
            samples = [(as_sample(dataset[index]), shape_of(shapes[index])) for index in ends]
    except Exception:
        # A sample that cannot be read is reported when its turn comes, by name and on all ranks at once.
        return None
    return common_keys(sequence_keys(sample, shape, rules) for sample, shape in samples) or None


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(value) if value.dtype.kind in "biufc" else value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Number | list | tuple):
        try:
            return torch.as_tensor(value)
        except (ValueError, TypeError, RuntimeError):
            return value
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value


def _sequence_first(key: str, value: Any, rules: CollateRules) -> Any:
    """The value of one sample with its sequence axis in front."""
    axis = rules.sequence_dims.get(key, 1) - 1
    return value.movedim(axis, 0) if isinstance(value, torch.Tensor) and 0 < axis < value.dim() else value


def _axes_along(value: Any, shape: Shape) -> int:
    """How many leading axes of a value run along the sample's axes; 0 if it is no sequence."""
    if not isinstance(value, torch.Tensor):
        return 0
    for axes in range(len(shape), 0, -1):
        if tuple(value.shape[:axes]) == shape[:axes]:
            return axes
    return 0


def _check_keys(rows: Sequence[Sample], ids: Sequence[int]) -> None:
    for row, sample_id in zip(rows, ids, strict=True):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"sample {sample_id} has the keys {sorted(row)}, sample {ids[0]} has {sorted(rows[0])}; all "
                "samples of a dataset need the same keys"
            )


def _check_lengths(
    rows: Sequence[Sample], micro_batch: MicroBatch, keys: Mapping[str, int], rules: CollateRules
) -> None:
    for row, sample_id, shape in zip(rows, micro_batch.sample_ids, micro_batch.shapes, strict=True):
        found = sequence_keys(row, shape, rules)
        wrong = [key for key, axes in sorted(keys.items()) if found.get(key, 0) < axes]
        if wrong or not keys:
            listed = {k: tuple(v.shape) for k, v in row.items() if isinstance(v, torch.Tensor) and v.dim()}
            shown = {key: listed.get(key) for key in wrong} if wrong else listed
            raise ValueError(
                f"sample {sample_id} was declared with shape {shape}, but its data has {shown}; the lengths and "
                "the data must agree (and not change between two readings of a sample)"
            )


def _shift(rows: Sequence[Sample], keys: Mapping[str, int], rules: CollateRules) -> dict[str, int]:
    """Replace the labels of each sample, before padding, by those of the next position."""
    key = rules.labels_key
    for row in rows:
        source = key if key in row else SEQUENCE_KEY
        if source not in keys:
            raise ValueError(
                f'shift_labels=True needs labels along the sequence under "{key}", or "{SEQUENCE_KEY}" to make '
                f"them from; the samples have {sorted(row)}"
            )
        labels = row[source]
        row[key] = torch.cat([labels[1:], torch.full_like(labels[:1], rules.ignore_index)])
    return {**keys, key: keys[source]}


def _pad(
    key: str, values: Sequence[torch.Tensor], axes: int, micro_batch: MicroBatch, rules: CollateRules
) -> torch.Tensor:
    """Stack values ``[s_i, ...]`` to ``[B, S, ...]``."""
    first = [_sequence_first(key, value, rules) for value in values]
    rest = first[0].shape[axes:]
    for value, sample_id in zip(first, micro_batch.sample_ids, strict=True):
        if value.shape[axes:] != rest:
            raise ValueError(
                f'"{key}" of sample {sample_id} has the shape {tuple(value.shape)}, that of sample '
                f"{micro_batch.sample_ids[0]} {tuple(first[0].shape)}; only the axes of the sequence may differ"
            )
    size = (len(first), *micro_batch.padded_shape[:axes], *rest)
    padded = torch.full(size, rules.pad_value(key), dtype=_common_dtype(first))
    for row, value in zip(padded, first, strict=True):
        row[tuple(slice(0, length) for length in value.shape[:axes])] = value
    axis = rules.sequence_dims.get(key, 1)
    return padded if axis == 1 else padded.movedim(1, axis).contiguous()


def _stack(key: str, values: Sequence[Any], micro_batch: MicroBatch) -> Any:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < len(values):
        return list(values)
    for value, sample_id in zip(tensors, micro_batch.sample_ids, strict=True):
        if value.shape != tensors[0].shape:
            raise ValueError(
                f'"{key}" of sample {sample_id} has the shape {tuple(value.shape)}, that of sample '
                f"{micro_batch.sample_ids[0]} {tuple(tensors[0].shape)}, and neither runs along the sequence; "
                "make them equal, or override collate"
            )
    return torch.stack([value.to(_common_dtype(tensors)) for value in tensors])


def _common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The type that loses none of the values: a number may be an int in one sample and a float in another."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _add_positions(batch: Batch, micro_batch: MicroBatch) -> Batch:
    count, padded = micro_batch.batch_size, micro_batch.padded_shape
    if POSITIONS not in batch:
        batch[POSITIONS] = torch.arange(padded[0], dtype=torch.int64).repeat(count, 1)
    if MASK not in batch:
        mask = torch.zeros((count, *padded), dtype=torch.bool)
        for row, shape in zip(mask, micro_batch.shapes, strict=True):
            row[tuple(slice(0, length) for length in shape)] = True
        batch[MASK] = mask
    return batch
