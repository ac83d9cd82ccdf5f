"""Noise that belongs to a sample and a token: the same for every shard, batch and padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dcp.sequence_parallel import rand_per_sample
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.random import philox

LENGTHS = {3: 5, 11: 8, 7: 2, 2**40 + 3: 8}


def _context(
    ids: tuple[int, ...],
    padded: int,
    *,
    size: int = 1,
    rank: int = 0,
    seed: int = 1,
    epoch: int = 0,
    packed: bool = False,
) -> MicroBatchContext:
    return MicroBatchContext(
        group=SPGroup(ranks=tuple(range(size)), rank=rank),
        sample_ids=ids,
        shapes=tuple((LENGTHS[i],) for i in ids),
        padded_shape=(padded,),
        packed=packed,
        seed=seed,
        epoch=epoch,
    )


def _draw(context: MicroBatchContext, shape: tuple[int, ...] = (3, 2), **kwargs: object) -> Tensor:
    with activate(context):
        return rand_per_sample(shape, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Known answers of the authors' reference implementation for Philox4x32-10."""
    found = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shards_of_every_size_give_the_same_noise(distribution: str, dtype: torch.dtype) -> None:
    whole = _draw(_context((3, 11), 8), distribution=distribution, dtype=dtype)
    assert whole.shape == (2, 8, 3, 2)
    assert whole.dtype == dtype
    for size in (2, 4, 8):
        parts = [
            _draw(_context((3, 11), 8, size=size, rank=rank), distribution=distribution, dtype=dtype)
            for rank in range(size)
        ]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_batch_and_padding_do_not_matter() -> None:
    alone = {i: _draw(_context((i,), LENGTHS[i]))[0] for i in LENGTHS}
    for ids, padded in (((3, 11), 8), ((11, 7, 3), 12), ((7, 2**40 + 3), 64)):
        together = _draw(_context(ids, padded))
        for row, i in zip(together, ids, strict=True):
            assert torch.equal(row[: LENGTHS[i]], alone[i])


def test_patches_of_a_frame_do_not_depend_on_padding() -> None:
    short, long = _draw(_context((3,), 8), (5, 2)), _draw(_context((3,), 8), (9, 2))
    assert torch.equal(short, long[:, :, :5])


def test_packed_rows_give_each_sample_its_own_noise() -> None:
    ids = (3, 7, 11)
    row = torch.cat([_draw(_context(ids, 16, size=2, rank=r, packed=True)) for r in range(2)], dim=1)
    assert row.shape == (1, 16, 3, 2)
    parts = row[0, :15].split_with_sizes([LENGTHS[i] for i in ids])
    for part, i in zip(parts, ids, strict=True):
        assert torch.equal(part, _draw(_context((i,), LENGTHS[i]))[0])


def test_levels_are_one_for_each_sample_alike_on_all_ranks() -> None:
    levels = _draw(_context((3, 11), 8), (), per="sample", distribution="uniform")
    assert levels.shape == (2,)
    other = _draw(_context((11,), 16, size=4, rank=3), (), per="sample", distribution="uniform")
    assert torch.equal(other, levels[1:])
    assert _draw(_context((3, 7, 11), 16, packed=True), (4,), per="sample").shape == (3, 4)


def test_everything_that_should_matter_does() -> None:
    base = _context((3, 11), 8)
    draws = [
        _draw(base),
        _draw(base, stream=1),
        _draw(base, distribution="uniform"),
        _draw(base, stream=1, distribution="uniform"),
        _draw(_context((3, 11), 8, seed=2)),
        _draw(_context((3, 11), 8, seed=2**33 + 1)),
        _draw(_context((3, 11), 8, seed=-1)),
        _draw(_context((3, 11), 8, epoch=1)),
        _draw(_context((7, 2**40 + 3), 8)),
    ]
    tokens = torch.cat([draw.reshape(-1) for draw in draws])
    assert len(torch.unique(tokens)) == tokens.numel()


def test_distributions() -> None:
    context = MicroBatchContext(sample_ids=(0,), shapes=((1 << 16,),), padded_shape=(1 << 16,))
    uniform = _draw(context, (4,), distribution="uniform", dtype=torch.float64)
    normal = _draw(context, (4,), dtype=torch.float64)
    n = uniform.numel()
    # Kolmogorov-Smirnov at the 0.1 % level for both; no draw of a fixed seed is by chance.
    for cumulative in (uniform, torch.special.ndtr(normal)):
        ordered = cumulative.flatten().sort().values
        assert 0 <= ordered[0] <= ordered[-1] < 1
        assert (ordered - torch.arange(1, n + 1) / n).abs().max() < 1.95 / n**0.5
    for values in (uniform, normal):
        columns = values.view(-1, 4).T
        assert (torch.corrcoef(columns) - torch.eye(4)).abs().max() < 4 / (n / 4) ** 0.5
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = _draw(context, (4,), distribution="uniform", dtype=dtype)
        assert 0 <= short.min() <= short.max() < 1


def test_no_generator_is_touched_and_a_draw_repeats() -> None:
    state = torch.get_rng_state()
    first, second = _draw(_context((3,), 8)), _draw(_context((3,), 8))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match="none is running"):
        rand_per_sample((3,))
    for arguments in ({"stream": 128}, {"stream": -1}, {"distribution": "gamma"}, {"per": "batch"}):
        with pytest.raises(ValueError, match="allowed are streams 0 to 127"):
            _draw(_context((3,), 8), **arguments)
    with pytest.raises(ValueError, match="epochs below"):
        _draw(_context((3,), 8, epoch=1 << 16))
