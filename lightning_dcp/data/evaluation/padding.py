"""Batches of a user's evaluation loader with torch's default collate, which cannot stack samples of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_dcp.data.collate import CollateRules, detect_sequence_axes
from lightning_dcp.data.lengths import known_shapes, measure, read_shapes
from lightning_dcp.data.takeover.collating import LoaderCollate, is_paddable
from lightning_dcp.plan import MicroBatch
from lightning_dcp.planners.assembly import pad


def collate_of(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """A loader's ``collate_fn``; in the place of torch's default one that pads as it is padded in training."""
    if loader.collate_fn is not default_collate or loader.batch_sampler is None:
        return loader.collate_fn
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__len__") or not len(dataset) or known_shapes(dataset) is None:
        return PaddingCollate(rules=CollateRules(), lengths_differ=False)
    shapes = read_shapes(dataset)
    rules = replace(CollateRules(), sequence_axes=detect_sequence_axes(dataset, shapes, CollateRules()))
    return PaddingCollate(rules=rules, lengths_differ=bool((shapes != shapes[0]).any()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingCollate:
    """Torch's default collate, but for dicts and bare tensors whose lengths differ.

    Attributes:
        rules: of the padding.
        lengths_differ: whether they are known to differ somewhere in the dataset, so that each batch gets a mask.
            Otherwise only a batch in which they do is padded and gets one.
    """

    rules: CollateRules
    lengths_differ: bool

    def __call__(self, samples: Sequence[Any]) -> Any:
        """One batch."""
        shapes = [measure(sample) for sample in samples] if is_paddable(samples[0]) else []
        found = tuple(shape for shape in shapes if shape is not None)
        if len(found) < len(samples) or not (self.lengths_differ or len(set(found)) > 1):
            return default_collate(list(samples))
        micro_batch = MicroBatch(
            sample_ids=tuple(range(len(samples))),
            shapes=found,
            padded_shape=pad(found, 1),
            first_rank=0,
            sp_size=1,
            nanoseconds=0,
            bytes=0,
        )
        return LoaderCollate(collate_fn=default_collate, rules=self.rules, lengths_differ=True)(
            samples, micro_batch
        )
