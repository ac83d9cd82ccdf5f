"""Which sequence-parallel sizes a run may use: what user, heads and ranks allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.agreement import raise_together
from lightning_dcp.cost import IntArray
from lightning_dcp.data.batch import Batch, is_divisible
from lightning_dcp.data.lengths import shape_of
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.plan import MicroBatch
from lightning_dcp.preparation.settings import Settings, Site
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.sequence_parallel.interception import AttentionRecorder
from lightning_dcp.topology import nested_sizes


def short_samples(shapes: IntArray, count: int = 16) -> tuple[int, ...]:
    """Short samples of different shapes for the self-check, the shortest first.

    From the shortest quarter of the shapes that occur, evenly spaced; the self-check takes the first two that have
    an item of the loss. Each shape is stood for by its smallest position, so every rank chooses the same.

    Args:
        shapes: size of each sample, int64 ``[n, axes]``.
        count: most samples to give.
    """
    _, first = np.unique(shapes, axis=0, return_index=True)
    order = first[np.lexsort((first, shapes[first].prod(axis=1)))]
    quarter = order[: max(count, len(order) // 4)]
    picks = np.unique(np.linspace(0, len(quarter) - 1, min(count, len(quarter))).astype(np.int64))
    return tuple(int(i) for i in quarter[picks])


def chosen_sizes(legal: Iterable[int], asked: Iterable[int] | None) -> tuple[int, ...]:
    """Sizes to use among the legal ones, ascending, 1 among them.

    Args:
        legal: sizes that heads and ranks allow.
        asked: the user's sizes, which are used as they are; ``None`` for the most that divide one another in turn,
            since other sizes would leave each other no room in the family of groups.
    """
    return nested_sizes(legal) if asked is None else tuple(sorted({1} | (set(legal) & set(asked))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sequence-parallel sizes of a run.

    Attributes:
        used: ascending; 1 is always among them.
        left_out: why other sizes up to the number of ranks are not used, and which these are.
    """

    used: tuple[int, ...] = (1,)
    left_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def sp_sizes(
    settings: Settings,
    site: Site,
    runner: MicroBatchRunner,
    loader: DCPLoader,
    load: Callable[[MicroBatch], Batch],
) -> Sizes:
    """Sizes that the user allows, the heads can be divided by and the world holds; called by every rank.

    Args:
        settings: the strategy's arguments.
        site: this rank.
        runner: runs ``training_step`` on single ranks.
        loader: the train loader.
        load: a collated micro-batch on the device.
    """
    wanted = set(settings.sp_sizes or range(1, site.world_size + 1))
    wider = tuple(range(2, site.world_size + 1))
    if site.world_size == 1 or wanted == {1}:
        return Sizes(left_out={f"not among sp_sizes={sorted(wanted)}": wider} if wider else {})
    if loader.shapes.shape[1] > 1:
        rank_zero_info(
            "Sequence parallelism is not available for samples of more than one axis: all groups have one rank."
        )
        return Sizes(left_out={"samples have more than one axis": wider})
    seen, error, kind = AttentionRecorder(), None, None
    try:
        kind = watch_attention(seen, site.rank, runner, loader.shapes, load)
    except Exception as raised:  # user code, which may fail on one rank only
        error = raised
    raise_together(error, site.world_size, "a first forward of training_step")
    if kind is not None:
        rank_zero_warn(
            f"collate_fn makes batches of type {kind}, whose sequences have no keys, so they cannot be divided and "
            "every group has one rank. Let collate_fn return a dict of tensors to use more ranks per sequence"
        )
        return Sizes(left_out={"batches of this collate_fn cannot be divided": wider})
    if not seen.heads:
        rank_zero_warn(
            "No call of torch.nn.functional.scaled_dot_product_attention was seen in training_step, so sequences "
            "cannot be divided and every group has one rank. Call it through the module "
            '(F.scaled_dot_product_attention), or use attn_implementation="sdpa" in Hugging Face models'
        )
        return Sizes(left_out={"no call of scaled_dot_product_attention was seen": wider})
    legal = set(seen.sp_sizes(site.world_size))
    chosen = chosen_sizes(legal, settings.sp_sizes)
    refused = sorted(wanted - legal) if settings.sp_sizes else []
    if seen.cross_attention:
        rank_zero_warn(
            "Attention between sequences of different lengths was seen in training_step; only self-attention can be "
            "divided, so every group has one rank. Set sp_sizes=[1] if that is meant"
        )
        return Sizes(left_out={"attention between sequences of different lengths": wider})
    if refused or chosen == (1,):
        rank_zero_warn(
            f"Sequence-parallel sizes {refused or sorted(wanted - {1})} do not divide the attention heads "
            f"{sorted(seen.heads)} (heads, key/value heads) on {site.world_size} ranks; used are {list(chosen)}"
        )
    unchosen = (
        f"not among sp_sizes={sorted(wanted)}" if settings.sp_sizes else "they do not divide the others in turn"
    )
    reasons = {
        "they do not divide the attention heads": tuple(p for p in wider if p not in legal),
        unchosen: tuple(p for p in wider if p in legal and p not in chosen),
    }
    return Sizes(used=chosen, left_out={reason: sizes for reason, sizes in reasons.items() if sizes})


def watch_attention(
    recorder: AttentionRecorder,
    rank: int,
    runner: MicroBatchRunner,
    shapes: IntArray,
    load: Callable[[MicroBatch], Batch],
) -> str | None:
    """Record what ``training_step`` asks of attention for two samples: one may be as long as a fixed memory is.

    Returns:
        The type of the batches where they cannot be divided.
    """
    kind = None
    for sample in short_samples(shapes, 2):
        shape = shape_of(shapes[sample])
        micro_batch = MicroBatch(
            sample_ids=(sample,), shapes=(shape,), padded_shape=shape, first_rank=rank, sp_size=1, nanoseconds=0,
            bytes=0,
        )  # fmt: skip
        batch = load(micro_batch)
        kind = kind if is_divisible(batch) else type(batch).__name__
        with untouched(runner.module), recorder, torch.no_grad(), runner.step(micro_batch, batch):
            pass
    return kind
