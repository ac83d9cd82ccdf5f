"""The optimizer's state by parameter name: together in one file, and apart again on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.checkpoint.gathering import Route, gather_fragments, gather_whole
from lightning_dcp.checkpoint.shards import Shard, Shards

State = dict[str, Any]
Names = Sequence[Sequence[str]]

_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"})
"""What schedules of torch write into the groups of an optimizer."""


def whole_state(shards: Shards, names: Names, route: Route) -> State:
    """The state of the user's optimizer as if one process had held all of it; called by every rank.

    It is what ``torch.optim.Optimizer.state_dict`` gives, with the parameters' names where that has numbers, so that
    an optimizer over the same groups of parameters loads it under any strategy. Values that belong to a whole group
    under ZeRO (the number of steps) stand with each of its parameters.

    Args:
        shards: what this rank holds.
        names: the parameters of each group as the user made it, frozen ones too.
        route: this rank and the others.

    Returns:
        ``state`` and ``param_groups`` in CPU memory, on rank 0; nothing elsewhere.

    Raises:
        MisconfigurationException: on all ranks: a state that belongs to neither an element nor a group.
    """
    state: State = {}
    for shard in shards.groups:
        values: State = shards.optimizer.state.get(shard.flat, {})
        spread, common = _sorted_out(values, shard, type(shards.optimizer).__name__, route)
        shapes = {name: p.shape for name, p in shard.parameters.items()}
        held = gather_fragments(shard, route) if spread else []
        whole = {key: gather_whole(values[key], shapes, held, route) for key in spread}
        if route.rank == 0 and values:
            for name in shapes:
                own = {key: _copied(values[key]) for key in common}
                state[name] = {**own, **{key: tensors[name] for key, tensors in whole.items()}}
    if route.rank:
        return {}
    groups = [
        {**{key: _copied(value) for key, value in group.items() if key != "params"}, "params": list(members)}
        for group, members in zip(shards.optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def load_state(shards: Shards, names: Names, saved: Mapping[str, Any]) -> None:
    """Take this rank's part of a whole state; called by every rank, nothing is communicated.

    Args:
        shards: what this rank holds.
        names: see :func:`whole_state`.
        saved: ``state`` and ``param_groups``, of :func:`whole_state` or of another strategy.

    Raises:
        MisconfigurationException: the groups of the optimizer are not those of the saved one, it is another kind of
            optimizer, or a state has not the shape of its parameter.
    """
    state = _by_name(names, saved)
    optimizer = shards.optimizer
    local: dict[int, State] = {}
    groups: list[State] = []
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        _check_kind(saved_group, group, optimizer)
        numbers = range(len(local), len(local) + len(group["params"]))
        for number, flat in zip(numbers, group["params"], strict=True):
            local[number] = _own_part(shards.of(flat), state)
        groups.append({**saved_group, "params": list(numbers)})
    kept = {number: values for number, values in local.items() if values}
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def _check_kind(saved: Mapping[str, Any], group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse the group of another optimizer; one that only lacks, or only has, some settings is of another version."""
    lacking = sorted(optimizer.defaults.keys() - saved.keys())
    foreign = sorted(saved.keys() - group.keys() - _OF_SCHEDULES)
    if lacking and foreign:
        raise MisconfigurationException(
            f"The checkpoint's optimizer has the settings {foreign}, which {type(optimizer).__name__} has not, and "
            f"lacks {lacking}: it is another optimizer. Return the one of the checkpoint from configure_optimizers, or "
            "start from the weights alone with load_from_checkpoint"
        )


def _sorted_out(values: State, shard: Shard, optimizer: str, route: Route) -> tuple[list[str], list[str]]:
    """Kinds of state that have a value for each element, and those with one for the group; the same on all ranks."""
    spread = [key for key, value in values.items() if _is_spread(value, shard.flat)]
    common = [key for key in values if key not in spread]
    odd = [key for key in common if isinstance(values[key], Tensor) and values[key].dim() > 0]
    everyone = of_all_ranks((spread, common, odd), route.world_size)
    if any(other != everyone[0] for other in everyone) or everyone[0][2]:
        raise MisconfigurationException(
            f"The state of {optimizer} cannot be saved by parameter: {sorted({k for e in everyone for k in e[2]})} "
            "has neither one value for each element of the parameters nor one for the group, or exists on some ranks "
            "only. Save the weights alone (save_weights_only=True), or use an optimizer of torch.optim"
        )
    return spread, common


def _is_spread(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _by_name(names: Names, saved: Mapping[str, Any]) -> State:
    """The saved state of each parameter; a file of another strategy numbers them in the order of the groups."""
    groups = saved["param_groups"]
    then, now = ([len(members) for members in rows] for rows in ([g["params"] for g in groups], names))
    if then != now:
        raise MisconfigurationException(
            f"The checkpoint's optimizer has groups of {then} parameters, this one has {now}. Make the groups in "
            "configure_optimizers as they were, or start from the weights alone with load_from_checkpoint"
        )
    name_of: dict[int | str, str] = {}
    for group, members in zip(groups, names, strict=True):
        for key, name in zip(group["params"], members, strict=True):
            if isinstance(key, str) and key not in members:
                raise MisconfigurationException(
                    f"The checkpoint's optimizer has {key!r} in a group where this one has {sorted(members)[:3]} and "
                    "others. Make the groups in configure_optimizers as they were, or start from the weights alone "
                    "with load_from_checkpoint"
                )
            name_of[key] = key if isinstance(key, str) else name
    return {name_of[key]: values for key, values in saved["state"].items() if key in name_of}


def _own_part(shard: Shard, state: State) -> State:
    """What of a whole state lies in this rank's partition."""
    members = {name: state[name] for name in shard.parameters if name in state}
    part: State = {}
    for key in dict.fromkeys(key for values in members.values() for key in values):
        values = {name: own[key] for name, own in members.items() if key in own}
        _check_shapes(key, values, shard)
        if all(_is_whole(value, shard, name) for name, value in values.items()):
            part[key] = scatter(shard, values, next(iter(values.values())).dtype)
        else:
            part[key] = _one_for_all(key, values)
    return part


def _check_shapes(key: str, values: State, shard: Shard) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1 and not _is_whole(value, shard, name):
            raise MisconfigurationException(
                f"The checkpoint's optimizer has a state {key!r} of shape {tuple(value.shape)} for {name}, which has "
                f"the shape {tuple(shard.parameters[name].shape)}; allowed is that shape, or one number. Resume the "
                "model that was saved, or start from the weights alone with load_from_checkpoint"
            )


def _is_whole(value: Any, shard: Shard, name: str) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.parameters[name].shape


def scatter(shard: Shard, whole: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Partition of whole tensors that is this rank's, on its device; zeros where nothing is given."""
    flat = torch.zeros_like(shard.flat, dtype=dtype, requires_grad=False)
    for fragment in shard.fragments:
        if fragment.name in whole:
            flat[fragment.start : fragment.start + fragment.length] = part_of(whole[fragment.name], fragment)
    return flat


def part_of(whole: Tensor, fragment: Any) -> Tensor:
    """A fragment of a whole tensor, ``[length]``."""
    return whole.reshape(-1)[fragment.place : fragment.place + fragment.length]


def _one_for_all(key: str, values: State) -> Any:
    """What ZeRO keeps once for a group; a single process keeps it by parameter, where it may differ."""
    distinct = list(_distinct(values.values()))
    if len(distinct) > 1:
        rank_zero_warn(
            f"The checkpoint's optimizer has different values of {key!r} for parameters of one group "
            f"({min(distinct)} to {max(distinct)}); under DeepSpeed a group has one, so the largest is taken"
        )
    return _copied(max(distinct))


def _distinct(values: Any) -> Iterator[Any]:
    seen: list[Any] = []
    for value in values:
        if not any(value == other for other in seen):
            seen.append(value)
            yield value
