"""Which parts of the parameters and of the optimizer's state this rank holds.

All private names of DeepSpeed that a checkpoint needs stand in this file; ``tests/test_checkpoint_shards.py`` checks
that they exist.

ZeRO-1 lays the trainable parameters of a group end to end, adds a few elements so that the ranks can divide them
evenly, and gives each rank one stretch: its partition. The user's optimizer holds this one flat tensor per group,
and its state has the same shape. A parameter may begin on one rank and end on the next. ::

    parameters   [   embedding   ][ weight ][bias][pad]
    partitions   [    rank 0    |    rank 1    |   rank 2   ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Fragment(NamedTuple):
    """The part of one parameter that lies in a rank's partition; in elements.

    Attributes:
        name: name of the parameter.
        place: where the part begins in the flattened parameter.
        start: where it begins in the partition.
        length: how long it is.
    """

    name: str
    place: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One group of parameters as one rank holds it.

    Attributes:
        parameters: the trainable parameters of the group by name, the same on every rank.
        flat: this rank's partition; float32, the parameter of the user's optimizer.
        fragments: what lies where in it.
    """

    parameters: dict[str, nn.Parameter]
    flat: Tensor
    fragments: tuple[Fragment, ...]

    @property
    def has_masters(self) -> bool:
        """Whether the partition is more exact than the parameters (bf16); else it holds the same bits."""
        return any(p.dtype != self.flat.dtype for p in self.parameters.values())


class Shards:
    """The groups of a DeepSpeed optimizer of stage 1, in the order of the user's optimizer.

    Args:
        zero: the optimizer that ``deepspeed.initialize`` made of the user's.
        module: the user's module.
    """

    def __init__(self, zero: Any, module: nn.Module) -> None:
        keeps_float32 = hasattr(zero, "fp32_groups_flat_partition")
        groups = zero.bf16_groups if keeps_float32 else zero.bit16_groups
        flats = zero.fp32_groups_flat_partition if keeps_float32 else zero.single_partition_of_fp32_groups
        names = {id(p): name for name, p in module.named_parameters()}
        self.optimizer: torch.optim.Optimizer = zero.optimizer
        """The user's own optimizer, which steps the partitions."""
        self.groups = [
            _shard({names[id(p)]: p for p in group}, flat) for group, flat in zip(groups, flats, strict=True)
        ]

    def of(self, flat: Tensor) -> Shard:
        """The group whose partition an optimizer's parameter is."""
        return next(shard for shard in self.groups if shard.flat is flat)


def _shard(parameters: dict[str, nn.Parameter], flat: Tensor) -> Shard:
    fragments = []
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            inside, outside = mapping.hp_fragment_address, mapping.lp_fragment_address
            fragments.append(Fragment(name, outside.start, inside.start, inside.numel))
    return Shard(parameters, flat, tuple(sorted(fragments, key=lambda fragment: fragment.start)))
