"""The values of an epoch: one gather in the place of Lightning's reductions key by key.

Lightning reduces each key that was logged with ``sync_dist`` on its own, in the order of the calls on each rank. A rank
that never had a micro-batch, or that logged other keys, would leave the others waiting or mix keys up.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_dcp.agreement import StepError, of_all_ranks
from lightning_dcp.logged import Results
from lightning_dcp.upstream import (
    ListKind,
    LoggedAs,
    count_as_updated,
    fill_lists,
    is_settled,
    kept_lists,
    last_value,
    logged_as,
    new_result,
    on_epoch_end,
    replace_results,
    results_of,
    settle,
    show,
    watched_at_step,
)


class Entry(NamedTuple):
    """What one rank holds of a key at the end of an epoch.

    Attributes:
        logged_as: the arguments it was logged with.
        is_metric: a torchmetrics object, which adds up over ranks by itself.
        total: sum of the weighted values (mean), or the sum, least or largest value; ``None`` where nothing counted.
        weight: what they count together.
        wide: logged in float64.
        uncounted: it was logged, though with weight 0.
        lists: kinds of the lists of values that a torchmetrics object keeps.
    """

    logged_as: LoggedAs
    is_metric: bool
    total: float | None
    weight: float
    wide: bool
    uncounted: bool
    lists: dict[str, ListKind]


def take_over_results(trainer: pl.Trainer) -> None:
    """Let a trainer's loops add up by weight, and agree over all ranks at the end of each epoch.

    Args:
        trainer: under a strategy that knows its world.
    """
    replace_results(trainer, Results)
    on_epoch_end(trainer, agree)


def agree(trainer: pl.Trainer) -> None:
    """Give every key of a finished epoch its value over all ranks, on every rank; one small gather, by every rank.

    Keys that were logged without ``sync_dist`` too: ranks hold different numbers of items, so the mean of one rank
    says nothing, and a callback that watches it would decide differently on each.

    Raises:
        StepError: on all ranks, if two of them logged a key with different arguments.
    """
    results = results_of(trainer)
    if not isinstance(results, Results):
        return
    everyones = of_all_ranks(_mine(results), trainer.world_size)
    keys = list(dict.fromkeys(key for entries in everyones for key in entries))
    for key in keys:
        held = {rank: entries[key] for rank, entries in enumerate(everyones) if key in entries}
        _check_alike(held)
        first = next(iter(held.values()))
        if key not in results:
            results[key] = new_result(first.logged_as, trainer, is_tensor=not first.is_metric)
        if first.is_metric:
            _join(results[key], trainer, list(held.values()))
        else:
            _settle(results, key, list(held.values()), trainer.strategy.root_device)
    # In one order on all ranks, since a torchmetrics object communicates when it is computed.
    ordered = {key: results[key] for key in [*keys, *(key for key in results if key not in keys)]}
    results.clear()
    results.update(ordered)


def agree_on_step(trainer: pl.Trainer) -> None:
    """Give what is watched at this step by a callback or a schedule its value over all ranks; one small gather, by all.

    Only at steps at which something is watched. Each rank would decide by its own value otherwise, a rank without a
    micro-batch by none, and what follows a decision are collectives.

    Args:
        trainer: after the vote of a step whose calls of ``self.log`` are counted.
    """
    names = watched_at_step(trainer)
    results = results_of(trainer)
    if not names or not isinstance(results, Results):
        return
    everyones = of_all_ranks(_mine_of_step(results, names), trainer.world_size)
    for key in dict.fromkeys(key for entries in everyones for key in entries):
        held = {rank: entries[key] for rank, entries in enumerate(everyones) if key in entries}
        _check_alike(held)
        first = next(iter(held.values()))
        if key not in results:
            results[key] = new_result(first.logged_as, trainer, is_tensor=True)
        show(results[key], _value(list(held.values()), trainer.strategy.root_device))
        results[key].has_reset = False


def _mine_of_step(results: Results, names: Set[str]) -> dict[str, Entry]:
    """What counted on this rank in the last step, of the keys with these names."""
    entries = {}
    for key, weight in results.step_weights.items():
        meta, value = results[key].meta, last_value(results[key])
        watched = meta.on_step and not meta.sync.rank_zero_only and {meta.name, meta.forked_name(True)} & names
        if watched and value is not None:
            entries[key] = Entry(
                logged_as=logged_as(meta),
                is_metric=False,
                total=float(value) * (weight if meta.is_mean_reduction else 1.0),
                weight=weight,
                wide=key in results.wide,
                uncounted=False,
                lists={},
            )
    return entries


def _mine(results: Results) -> dict[str, Entry]:
    """What this rank holds of every key that has a value per epoch and is not rank 0's alone."""
    entries = {}
    for key, result in results.items():
        meta = result.meta
        if not meta.on_epoch or meta.sync.rank_zero_only or meta.sync.group is not None or is_settled(result):
            continue
        is_metric, counted = not result.is_tensor, result.update_called
        if is_metric and not counted:
            continue
        weighted = meta.is_mean_reduction and not is_metric
        entries[key] = Entry(
            logged_as=logged_as(meta),
            is_metric=is_metric,
            total=float(result.value) if counted and not is_metric else None,
            weight=float(result.cumulated_batch_size) if counted and weighted else float(counted),
            wide=key in results.wide,
            uncounted=key in results.uncounted,
            lists=kept_lists(result.value) if is_metric else {},
        )
    return entries


def _check_alike(held: dict[int, Entry]) -> None:
    first_rank, first = next(iter(held.items()))
    for rank, entry in held.items():
        if (entry.logged_as, entry.is_metric) != (first.logged_as, first.is_metric):
            raise StepError(
                f"self.log({first.logged_as.name!r}) was called with different arguments on the ranks: rank "
                f"{first_rank} has {first.logged_as.described(first.is_metric)}, rank {rank} has "
                f"{entry.logged_as.described(entry.is_metric)}. Log a key with the same arguments on all ranks"
            )


def _settle(results: Results, key: str, held: Sequence[Entry], device: torch.device) -> None:
    """Give a key its value over all ranks, or none where no call of it counted on any rank."""
    result = results[key]
    counted = [entry for entry in held if entry.total is not None]
    if not counted:
        result.has_reset = True
        if any(entry.uncounted for entry in held):
            rank_zero_warn(
                f"self.log({result.meta.name!r}) was called in this epoch only where nothing counts (shards without a "
                "valid label); the key has no value for the epoch"
            )
        return
    settle(result, _value(counted, device))
    result.has_reset = False


def _value(counted: Sequence[Entry], device: torch.device) -> Tensor:
    """Mean by weight, sum, least or largest value over the ranks; added up in rank order, so the same on all."""
    totals = [entry.total for entry in counted if entry.total is not None]
    operation = counted[0].logged_as.reduction
    if operation == "mean":
        value = sum(totals) / sum(entry.weight for entry in counted)
    else:
        value = sum(totals) if operation == "sum" else _extreme(operation, totals)
    dtype = torch.float64 if any(entry.wide for entry in counted) else torch.float32
    return torch.tensor(value, dtype=dtype, device=device)


def _extreme(operation: str, values: Sequence[float]) -> float:
    """As torch takes it: NaN where any value is."""
    return float(getattr(torch.tensor(values, dtype=torch.float64), operation)())


def _join(result: Any, trainer: pl.Trainer, held: Sequence[Entry]) -> None:
    """Let this rank compute a torchmetrics object of others too, though it may have added nothing to it."""
    attribute = held[0].logged_as.metric_attribute
    if not result.update_called and attribute is not None:
        result.value = trainer.lightning_module.get_submodule(attribute)
        count_as_updated(result)
    fill_lists(result.value, {name: kind for entry in reversed(held) for name, kind in entry.lists.items()})
    result.has_reset = False
