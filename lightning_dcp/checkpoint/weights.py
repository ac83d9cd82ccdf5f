"""Whole weights in the module's own names, float32 where the optimizer keeps them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_dcp.agreement import raise_together
from lightning_dcp.checkpoint.gathering import Route, gather_fragments, gather_whole
from lightning_dcp.checkpoint.optimizer_state import part_of
from lightning_dcp.checkpoint.shards import Shard, Shards


def whole_weights(module: nn.Module, shards: Shards | None, route: Route) -> dict[str, Any]:
    """``module.state_dict()`` in CPU memory, with the float32 masters of bf16 weights; called by every rank.

    The module's values hold: where somebody has changed a weight since the last step (averaging callbacks do), the
    weight is saved and not the master that it no longer comes from. Buffers are those of rank 0.

    Args:
        module: the user's module.
        shards: what this rank holds; ``None`` without an optimizer.
        route: this rank and the others.

    Returns:
        On rank 0 copies; elsewhere the module's own tensors under the same names, as nothing there is written.
    """
    masters: dict[str, Tensor] = {}
    for shard in shards.groups if shards is not None else []:
        if shard.has_masters:
            shapes = {name: p.shape for name, p in shard.parameters.items()}
            masters |= gather_whole(shard.flat, shapes, gather_fragments(shard, route), route)
    state: dict[str, Any] = module.state_dict()
    error = None
    if route.rank == 0:
        try:
            state = _copies(module, state, masters)
        except Exception as raised:
            error = raised
    raise_together(error, route.world_size, "copying the weights")
    return state


def _copies(module: nn.Module, state: Mapping[str, Any], masters: Mapping[str, Tensor]) -> dict[str, Any]:
    first_names = {id(p): name for name, p in module.named_parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    copies: dict[Any, Tensor] = {}

    def copied(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
            return value
        # Tied weights stay tied: one tensor for all names of the same memory.
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in copies or value.numel() == 0:
            parameter = parameters.get(name)
            own = parameter is not None and parameter.data_ptr() == value.data_ptr()
            master = masters.get(first_names[id(parameter)]) if own else None
            copies[key] = _copy(value.detach(), master)
        return copies[key]

    return {name: copied(name, value) for name, value in state.items()}


def _copy(value: Tensor, master: Tensor | None) -> Tensor:
    # Not .cpu(): ZeRO's weights are stretches of one flat tensor, which would be written whole for each of them.
    copy = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    if master is None:
        return copy
    return master if torch.equal(master.to(copy.dtype), copy) else copy.to(master.dtype)


def load_masters(shards: Shards, sources: Sequence[Mapping[str, Any]]) -> None:
    """Give bf16 weights their float32 masters back, after the weights were loaded; every rank takes its part.

    A master is taken from the first source that rounds to what the module holds. So it does not matter which of the
    checkpoint's weights were loaded, the averaged or the current ones, or whether a hook has changed them.

    Args:
        shards: what this rank holds.
        sources: whole weights by name, the likeliest first.
    """
    rounded: list[str] = []
    for shard in shards.groups:
        if shard.has_masters:
            rounded += _load_masters(shard, sources)
    if rounded:
        rank_zero_warn(
            f"The checkpoint has no float32 value of {len(rounded)} weights ({', '.join(rounded[:3])}), so they "
            "continue from their rounded values"
        )


@torch.no_grad()
def _load_masters(shard: Shard, sources: Sequence[Mapping[str, Any]]) -> list[str]:
    rounded = []
    for fragment in shard.fragments:
        weight = part_of(shard.parameters[fragment.name].detach(), fragment)
        master = shard.flat[fragment.start : fragment.start + fragment.length]
        for source in sources:
            exact = _matching(source.get(fragment.name), weight, fragment)
            if exact is not None:
                master.copy_(exact)
                break
        else:
            master.copy_(weight)
            rounded.append(fragment.name)
    return rounded


def _matching(source: Any, weight: Tensor, fragment: Any) -> Tensor | None:
    if not isinstance(source, Tensor) or source.numel() < fragment.place + fragment.length:
        return None
    exact = part_of(source, fragment).to(weight.device)
    return exact if torch.equal(exact.to(weight.dtype), weight) else None
