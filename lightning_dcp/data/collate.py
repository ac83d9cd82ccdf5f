"""From samples to one padded batch: every value that runs along the sequence takes the same route.

Shapes: B samples, S padded length of the first axis; the second axis of two-dimensional samples is padded alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        sequence_axes: for each key, how many axes of the sample its leading axes are (1 for values per frame of a
            two-dimensional sample, 0 for a value that is no sequence). Keys that are missing here are judged by
            their shapes in every micro-batch.
        sequence_dims: key to the axis of the BATCHED tensor along which its sequence runs, where that is not 1;
            ``None`` for a value that is no sequence whatever its shape.
        shift_labels: move the labels one to the left on the whole sequence, so that position ``i`` holds what
            comes after token ``i``. Without labels they are made from ``input_ids``.
        labels_key: key of the labels.
        ignore_index: label of padding and, when shifted, of the last token.
    """

    pad_values: Mapping[str, float] = field(default_factory=dict)
    sequence_axes: Mapping[str, int] = field(default_factory=dict)
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
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
    if rules.shift_labels:
        _make_labels(rows, rules)
    found = [sequence_axes(row, shape, rules) for row, shape in zip(rows, micro_batch.shapes, strict=True)]
    axes = {**common_axes(found), **{key: n for key, n in rules.sequence_axes.items() if key in rows[0]}}
    _check_lengths(rows, micro_batch, axes, rules)
    if rules.shift_labels:
        _shift(rows, axes, rules)
    batch: Batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if axes.get(key):
            batch[key] = _pad(key, values, axes[key], micro_batch, rules)
        else:
            batch[key] = _stack(key, values, micro_batch)
    return _add_positions(batch, micro_batch)


def as_sample(sample: Any) -> Sample:
    """A sample as a fresh dict in which arrays and lists of numbers are tensors."""
    fields = sample if isinstance(sample, Mapping) else {SEQUENCE_KEY: sample}
    row = {str(key): _as_tensor(value) for key, value in fields.items()}
    if not isinstance(sample, Mapping) and not isinstance(row[SEQUENCE_KEY], torch.Tensor):
        raise ValueError(
            f"a sample is of type {type(sample).__name__}; samples must be dicts, or tensors of tokens. For "
            "anything else override sample_shapes and collate"
        )
    return row


def sequence_axes(sample: Sample, shape: Shape, rules: CollateRules) -> dict[str, int]:
    """For each tensor of a sample, how many axes of the sample its leading axes are; 0 if it is no sequence."""
    return {
        key: _axes_along(_sequence_first(key, value, rules), shape)
        if rules.sequence_dims.get(key, 1) is not None
        else 0
        for key, value in sample.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }


def common_axes(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """What holds in all of several samples."""
    return {key: min(axes.get(key, 0) for axes in found) for key in found[0]}


def detect_sequence_axes(dataset: Any, shapes: IntArray, rules: CollateRules) -> dict[str, int]:
    """Tell sequences from other values by the samples of the least and the greatest size of each axis.

    A vector with as many elements as ONE sample has tokens is no sequence; samples of different length tell them
    apart. Empty where all samples are equally long, so that each micro-batch has to decide by itself.
    """
    if shapes[:, 0].min() == shapes[:, 0].max():
        return {}
    ends = sorted({int(i) for axis in shapes.T for i in (axis.argmin(), axis.argmax())})
    try:
        with isolated():
            samples = [(as_sample(dataset[index]), shape_of(shapes[index])) for index in ends]
    except Exception:
        # A sample that cannot be read is reported when its turn comes, by name and on all ranks at once.
        return {}
    axes = common_axes([sequence_axes(sample, shape, rules) for sample, shape in samples])
    return axes if any(axes.values()) else {}


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        # A copy: torch warns of arrays that cannot be written to, such as rows of a memory map.
        return torch.tensor(value) if value.dtype.kind in "biufc" else value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Number | list | tuple):
        try:
            return torch.as_tensor(value)
        except (ValueError, TypeError, RuntimeError):
            return value
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value


def _sequence_first(key: str, value: torch.Tensor, rules: CollateRules) -> torch.Tensor:
    """The value of one sample with its sequence axis in front."""
    dim = rules.sequence_dims.get(key)
    # An axis that is counted from the end is the same in a sample as in a batch.
    axis = 0 if dim is None else dim - 1 if dim > 0 else value.dim() + dim
    return value.movedim(axis, 0) if 0 < axis < value.dim() else value


def _axes_along(value: torch.Tensor, shape: Shape) -> int:
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
    rows: Sequence[Sample], micro_batch: MicroBatch, axes: Mapping[str, int], rules: CollateRules
) -> None:
    named = {key: 1 for key, dim in rules.sequence_dims.items() if dim is not None and key in rows[0]}
    wanted = {key: count for key, count in {**named, **axes}.items() if count or key in named}
    for row, sample_id, shape in zip(rows, micro_batch.sample_ids, micro_batch.shapes, strict=True):
        found = sequence_axes(row, shape, rules)
        wrong = [key for key, count in sorted(wanted.items()) if found.get(key, 0) < max(count, 1)]
        if wrong or not any(found.values()):
            shown = {key: tuple(row[key].shape) for key in (wrong or found) if isinstance(row[key], torch.Tensor)}
            raise ValueError(
                f"sample {sample_id} was declared with shape {shape}, but its data has {shown}; the lengths and "
                "the data must agree (and not change between two readings of a sample)"
            )
    if not wanted:
        raise ValueError(
            f"no value runs along the sequence in all of the samples {list(micro_batch.sample_ids)} of shapes "
            f"{micro_batch.shapes}; name the sequences by sequence_dims, or override collate"
        )


def _make_labels(rows: Sequence[Sample], rules: CollateRules) -> None:
    for row in rows:
        if rules.labels_key not in row and SEQUENCE_KEY in row:
            row[rules.labels_key] = row[SEQUENCE_KEY]


def _shift(rows: Sequence[Sample], axes: Mapping[str, int], rules: CollateRules) -> None:
    """Replace the labels of each sample, before padding, by those of the next position."""
    key = rules.labels_key
    if not axes.get(key):
        raise ValueError(
            f'shift_labels=True needs labels along the sequence under "{key}", or "{SEQUENCE_KEY}" to make them '
            f"from; the samples have {sorted(rows[0])}"
        )
    for row in rows:
        labels = _wide(row[key])
        row[key] = torch.cat([labels[1:], torch.full_like(labels[:1], rules.ignore_index)])


def _wide(labels: torch.Tensor) -> torch.Tensor:
    """Whole numbers as int64: narrow and unsigned types cannot hold the ignored label."""
    return labels if labels.is_floating_point() or labels.is_complex() else labels.to(torch.int64)


def _pad(
    key: str, values: Sequence[torch.Tensor], axes: int, micro_batch: MicroBatch, rules: CollateRules
) -> torch.Tensor:
    """Stack values ``[s_i, ...]`` to ``[B, S, ...]``."""
    first = [_sequence_first(key, value, rules) for value in values]
    if key == rules.labels_key:
        first = [_wide(value) for value in first]
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
    dim = rules.sequence_dims.get(key, 1)
    return padded if dim in (None, 1) else padded.movedim(1, dim).contiguous()


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
