"""What is known about the batches of a user's loader: how they are cut, and what their loss counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_dcp.data.batch import UncountedError
from lightning_dcp.data.collate import MASK, POSITIONS
from lightning_dcp.data.takeover.collating import LoaderCollate, replaced, sequence_length
from lightning_dcp.data.takeover.frames import framed, inner
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.sharding import shard_batch


class LoaderHooks:
    """Satisfies :class:`~lightning_dcp.data.loader.DataHooks` for a user's loader.

    Args:
        collate: makes the batches.
        count: the user's own ``loss_items``, if there is one.
    """

    def __init__(self, collate: LoaderCollate, count: Callable[[Any], int] | None = None) -> None:
        self.collate = collate
        self._count = count
        self._said = False

    def shard(self, batch: Any, group: SPGroup) -> Any:
        """Positions of a batch that one rank trains on; ``position_ids`` of the whole are added where absent."""
        if group.size == 1:
            return batch
        whole = inner(self.collate.frame, batch)
        length = sequence_length(whole) if isinstance(whole, Mapping) else None
        if length is None:
            raise ValueError(
                f"a batch is a {type(whole).__name__} without sequences [B, S, ...] by key, which cannot be divided; "
                "let collate_fn return a dict of tensors, or set sp_sizes=[1]"
            )
        content = dict(whole)
        if POSITIONS not in content:
            content[POSITIONS] = self._positions(content, length)
        cut = shard_batch(content, group, sequence_length=length)
        return framed(self.collate.frame, replaced(whole, cut))

    def loss_items(self, batch: Any) -> int:
        """Items of a shard: by the user's ``loss_items``, else valid labels, else real tokens.

        Raises:
            UncountedError: none of them is there.
        """
        if self._count is not None:
            return int(self._count(batch))
        part, rules = inner(self.collate.frame, batch), self.collate.rules
        labels, mask = _field(part, rules.labels_key), _field(part, MASK)
        if labels is not None:
            return int((labels != rules.ignore_index).sum())
        if mask is not None:
            return int((mask != 0).sum())
        names = f" with the keys {sorted(map(str, part))}" if isinstance(part, Mapping) else ""
        raise UncountedError(
            f'the batch is a {type(part).__name__}{names}, with neither "{rules.labels_key}" nor "{MASK}", so what its '
            'loss is the mean of is unknown. Return {"loss": sum, "count": number of items} from training_step, let '
            f'collate_fn return a dict with "{rules.labels_key}" or "{MASK}", or define loss_items(batch) on the '
            "LightningModule or the LightningDataModule"
        )

    def _positions(self, content: Mapping[Any, Any], length: int) -> Tensor:
        if not self._said:
            self._said = True
            rank_zero_info(
                "Batches at sequence-parallel sizes above 1 get position_ids [B, S / p], the places of a shard's "
                "tokens in the whole sequence. A model that takes no position_ids and counts from 0 in each shard "
                "would compute something else; the self-check compares both"
            )
        like = next(v for v in content.values() if isinstance(v, Tensor) and v.dim() > 1 and v.shape[1] == length)
        return torch.arange(length, device=like.device).repeat(like.shape[0], 1)


def _field(batch: Any, name: str) -> Tensor | None:
    """A tensor of a batch by name: a key, or an attribute of a dataclass or a named tuple."""
    value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    return value if isinstance(value, Tensor) else None
