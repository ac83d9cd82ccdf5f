"""What ``setup()`` chooses before anything is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from lightning_dcp.preparation import Settings, Site, Sizes, chosen_sizes, short_samples, sp_sizes
from lightning_dcp.topology import World, legal_sp_sizes
from tests.data_tools import Tokens, TokensModule
from tests.pool import Pool
from tests.profiling_tools import CPU, Model, load, runner_of


def test_short_samples_are_short_and_of_different_shapes() -> None:
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 4000, size=(5000, 1))
    ids = short_samples(shapes)
    lengths = [int(shapes[i, 0]) for i in ids]
    assert len(ids) == 16
    assert lengths == sorted(set(lengths)), "shortest first, each length once"
    assert lengths[0] == shapes.min()
    assert lengths[-1] <= np.quantile(np.unique(shapes), 0.26)
    assert lengths[-1] > 100, "all of the shortest lengths, and nothing to tell positions apart by"
    assert all(i == np.flatnonzero(shapes[:, 0] == n)[0] for i, n in zip(ids, lengths, strict=True))


def test_short_samples_of_few_shapes() -> None:
    assert short_samples(np.asarray([[5], [5], [3], [5]])) == (2, 0)
    assert short_samples(np.asarray([[7]])) == (0,)
    assert short_samples(np.asarray([[9], [4], [6]]), 1) == (1,)


def test_short_samples_of_two_axes() -> None:
    shapes = np.asarray([[4, 4], [2, 2], [2, 3], [3, 2], [2, 2]])
    assert short_samples(shapes) == (1, 2, 3, 0)


def test_sizes_that_do_not_divide_each_other_are_left_out() -> None:
    """Sizes 1, 2, 3 and 4 on four ranks leave a single pair: {0, 1, 2, 3} cannot hold both {0, 1, 2} and {2, 3}."""
    legal = legal_sp_sizes(4, 12)
    assert legal == (1, 2, 3, 4)
    assert chosen_sizes(legal, None) == (1, 2, 4)
    assert len(World.build(4, chosen_sizes(legal, None)).blocks_of(2)) == 2
    assert len(World.build(4, legal).blocks_of(2)) < 2


@pytest.mark.parametrize(
    ("asked", "chosen"), [((3,), (1, 3)), ((2, 3), (1, 2, 3)), ((1, 2, 3, 4), (1, 2, 3, 4)), ((5,), (1,))]
)
def test_sizes_of_the_user_are_used_as_they_are(asked: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    assert chosen_sizes(legal_sp_sizes(4, 12), asked) == chosen


def _sizes_of_twelve_heads(asked: tuple[int, ...] | None) -> Sizes:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    site = Site(rank=rank, world_size=world_size, ranks_per_node=world_size, device=CPU, precision="32-true")
    world = World.build(world_size, [1])
    loader = TokensModule(Tokens([8, 12, 9]), global_batch_size=2).train_dataloader()
    runner = runner_of(Model("tiny-1d", num_heads=12), world)
    return sp_sizes(Settings(sp_sizes=asked), site, runner, loader, load)


@pytest.mark.parametrize(
    ("asked", "chosen", "left_out"),
    [
        (None, (1, 2, 4), {"they do not divide the others in turn": (3,)}),
        ((3,), (1, 3), {"not among sp_sizes=[3]": (2, 4)}),
    ],
)
def test_sizes_of_a_model(
    pool: Pool, asked: tuple[int, ...] | None, chosen: tuple[int, ...], left_out: dict[str, tuple[int, ...]]
) -> None:
    found = pool.run(_sizes_of_twelve_heads, 4, asked)
    assert found == [Sizes(used=chosen, left_out=left_out)] * 4
