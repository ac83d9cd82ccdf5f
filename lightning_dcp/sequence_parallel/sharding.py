"""From a whole micro-batch to the shard of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dcp.sequence_parallel.context import SPGroup


def shard_batch(
    batch: dict[str, Any],
    group: SPGroup,
    *,
    sequence_length: int,
    sequence_dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Slice every sequence tensor of a batch to this rank's contiguous ``1 / p``; all else stays whole.

    A tensor is sliced along the axis that ``sequence_dims`` names for its key, otherwise along axis 1 if that has
    ``sequence_length`` entries. The guess cannot know that a per-sample feature ``[B, F]`` with ``F`` equal to
    the length is no sequence, nor find a sequence on another axis (a mask ``[B, 1, 1, S]``): name such keys. Every
    key of the batch survives. Tensors inside dicts, lists and tuples are found too; their key is the path, with
    dots (``"targets.weights"``, ``"views.0"``). An entry also holds for everything below its path.

    Args:
        batch: whole micro-batch, ``[B, S, ...]`` and ``[B, ...]`` tensors and anything else.
        group: sequence-parallel group; rank ``i`` gets positions ``i S / p .. (i + 1) S / p - 1``.
        sequence_length: padded length ``S``.
        sequence_dims: axis of the sequence by key; ``None`` means never shard.

    Returns:
        A new batch; the same one for a group of one rank.

    Raises:
        ValueError: ``S`` is no multiple of ``p``, or a named axis does not exist or does not have ``S`` entries.
    """
    if group.size == 1:
        return batch
    if sequence_length % group.size:
        raise ValueError(
            f"a padded length of {sequence_length} cannot be cut into {group.size} equal shards; "
            f"pad to a multiple of {group.size}"
        )
    slicer = _Slicer(group, sequence_length, sequence_dims or {})
    return {key: slicer.walk(value, str(key)) for key, value in batch.items()}


class _Slicer:
    def __init__(self, group: SPGroup, length: int, sequence_dims: Mapping[str, int | None]) -> None:
        self.part = length // group.size
        self.start = group.rank * self.part
        self.length = length
        self.sequence_dims = sequence_dims

    def walk(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._slice(value, path)
        if isinstance(value, dict):
            return {key: self.walk(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.walk(item, f"{path}.{index}") for index, item in enumerate(value)]
            # A named tuple takes its items one by one.
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _slice(self, tensor: Tensor, path: str) -> Tensor:
        found, dim = self._named_dim(path)
        if not found:
            dim = 1 if tensor.dim() > 1 and tensor.shape[1] == self.length else None
        if dim is None:
            return tensor
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != self.length:
            raise ValueError(
                f"sequence_dims says that axis {dim} of {path!r} is the sequence, but its shape is "
                f"{tuple(tensor.shape)} and the padded length {self.length}; name the axis of that length, "
                "or None to keep the tensor whole"
            )
        # Contiguous, since user code may call view; a copy also lets go of the whole tensor.
        return tensor.narrow(dim, self.start, self.part).contiguous()

    def _named_dim(self, path: str) -> tuple[bool, int | None]:
        while path:
            if path in self.sequence_dims:
                return True, self.sequence_dims[path]
            path = path.rpartition(".")[0]
        return False, None
