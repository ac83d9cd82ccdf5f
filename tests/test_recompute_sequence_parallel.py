"""Recomputed layers exchange their attention again, over the same group, also from a thread of autograd."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.models.presets import build
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.sequence_parallel.context import MicroBatchContext, activate
from lightning_dcp.sequence_parallel.interception import patched_attention
from tests.pool import Pool
from tests.sp_tools import world_group


def gradients(depth: int, *, threaded: bool = False) -> tuple[list[Tensor], int]:
    """Gradients of the whole sequence from the shards of all ranks, in float64, and the exchanged calls."""
    size = dist.get_world_size()
    group = world_group()
    torch.manual_seed(1)
    model = build("tiny-1d", dropout=0.2).double()
    ids = torch.arange(24).view(2, 12) % 64
    positions = torch.arange(12).expand(2, 12)
    shard = [t.chunk(size, dim=1)[group.rank] for t in (ids, positions)]
    parameters = list(model.parameters())
    found: list[Tensor] = []
    context = MicroBatchContext(group=group, sample_ids=(0, 1), shapes=((12,), (12,)), padded_shape=(12,))
    torch.manual_seed(group.rank)
    with activate(context), patched_attention(), RecomputeSwitch(find_families(model)).depth((depth,)):
        loss = model(*shard).square().sum()
        backward = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, parameters)))
        if threaded:
            backward.start()
            backward.join()
        else:
            backward.run()
    return found, context.interceptions


def compare() -> list[int]:
    expected, calls = gradients(0)
    counts = [calls]
    for depth, threaded in [(1, False), (2, False), (3, False), (3, True)]:
        got, calls = gradients(depth, threaded=threaded)
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        counts.append(calls)
    return counts


def test_recomputed_attention_is_exchanged(pool: Pool) -> None:
    """The attention of each recomputed layer is seen twice; gradients are bit-equal at every depth.

    The shards' dropout differs between ranks and repeats in the recompute.
    """
    for size in (2, 3):
        assert pool.run(compare, size) == [[3, 4, 5, 6, 6]] * size
