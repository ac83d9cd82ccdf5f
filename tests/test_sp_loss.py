"""Loss sums: however a batch is cut, sums and counts add up to those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_dcp.sequence_parallel import loss_sum
from lightning_dcp.sequence_parallel.context import LossWeighting, MicroBatchContext, SPGroup, activate

LENGTHS = (3, 7, 8, 1)
S = 8


def _values() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(len(LENGTHS), S, generator=rng, dtype=torch.float64)
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    mask[2, :4] = False
    mask[3] = False
    return values, mask


def _context(
    mask: Tensor, weighting: LossWeighting, *, rank: int = 0, size: int = 1, rows: slice = slice(None)
) -> MicroBatchContext:
    ids = tuple(range(len(LENGTHS)))[rows]
    return MicroBatchContext(
        group=SPGroup(ranks=tuple(range(size)), rank=rank),
        sample_ids=ids,
        shapes=tuple((LENGTHS[i],) for i in ids),
        padded_shape=(S,),
        weighting=weighting,
        items_per_sample_B=mask[rows].sum(1, dtype=torch.float64),
    )


def _expected(values: Tensor, mask: Tensor, weighting: LossWeighting) -> tuple[Tensor, float]:
    if weighting == "token":
        return values[mask].sum(), float(mask.sum())
    means = [row[valid].mean() for row, valid in zip(values, mask, strict=True) if valid.any()]
    return torch.stack(means).sum(), float(len(means))


@pytest.mark.parametrize("weighting", ["token", "sample"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [(slice(None),), (slice(0, 2), slice(2, 4)), (slice(0, 1), slice(1, 4))])
def test_shards_and_micro_batches_add_up(weighting: LossWeighting, size: int, rows: tuple[slice, ...]) -> None:
    """Covers allenai/OLMo-core#657 (shards, samples and micro-batches without a valid token) and
    PrimeIntellect-ai/prime-rl#1957 (sample 2 has its prompt in the early shards).
    """
    values, mask = _values()
    leaf = values.clone().requires_grad_()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for part in rows:
        for rank in range(size):
            here = (part, slice(rank * S // size, (rank + 1) * S // size))
            with activate(_context(mask, weighting, rank=rank, size=size, rows=part)):
                result = loss_sum(leaf[here], mask[here])
            total = total + result["loss"]
            count += float(result["count"])
    (gradient,) = torch.autograd.grad(total, leaf)
    whole = values.clone().requires_grad_()
    expected, items = _expected(whole, mask, weighting)
    assert float((total - expected).detach().abs()) < 1e-13
    assert count == pytest.approx(items, abs=1e-13)
    assert (gradient - torch.autograd.grad(expected, whole)[0]).abs().max() < 1e-15


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_masked_nan_reaches_neither_loss_nor_gradient(weighting: LossWeighting) -> None:
    values, mask = _values()
    poisoned = values.masked_fill(~mask, float("nan"))
    poisoned[0, 7], poisoned[1, 7] = float("inf"), -float("inf")
    poisoned.requires_grad_()
    with activate(_context(mask, weighting)):
        result = loss_sum(poisoned, mask)
    assert float((result["loss"].detach() - _expected(values, mask, weighting)[0]).abs()) < 1e-13
    (gradient,) = torch.autograd.grad(result["loss"], poisoned)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] > 0).all()


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_no_valid_token_at_all(weighting: LossWeighting) -> None:
    """Covers allenai/OLMo-core#657: 0/0 turned into NaN everywhere after the reduction."""
    logits = torch.randn(2, S, 5, requires_grad=True)
    labels = torch.full((2, S), -100)
    values = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    mask = labels != -100
    with activate(_context(mask, weighting, rows=slice(0, 2))):
        result = loss_sum(values, mask)
    assert float(result["loss"].detach()) == float(result["count"]) == 0.0
    (gradient,) = torch.autograd.grad(result["loss"], logits)
    assert (gradient == 0).all()


def test_packed_rows_weigh_by_sample() -> None:
    values, mask = _values()
    keep = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    row, row_mask = functional.pad(values[keep], (0, 1)), functional.pad(mask[keep], (0, 1))
    total, count = 0.0, 0.0
    for rank in range(4):
        context = MicroBatchContext(
            group=SPGroup(ranks=(0, 1, 2, 3), rank=rank),
            sample_ids=(0, 1, 2, 3),
            shapes=tuple((n,) for n in LENGTHS),
            padded_shape=(20,),
            packed=True,
            weighting="sample",
            items_per_sample_B=mask.sum(1, dtype=torch.float64),
        )
        here = slice(5 * rank, 5 * rank + 5)
        with activate(context):
            result = loss_sum(row[None, here], row_mask[None, here])
        total, count = total + float(result["loss"]), count + float(result["count"])
    expected, items = _expected(values, mask, "sample")
    assert total == pytest.approx(float(expected), abs=1e-13)
    assert count == pytest.approx(items, abs=1e-13)


def test_outside_a_step_the_mask_counts() -> None:
    values, mask = _values()
    result = loss_sum(values, mask)
    assert float(result["loss"]) == pytest.approx(float(values[mask].sum()), abs=1e-13)
    assert float(result["count"]) == float(mask.sum())
    with activate(MicroBatchContext(weighting="sample")):
        result = loss_sum(values, mask)
    expected, items = _expected(values, mask, "sample")
    assert float(result["loss"]) == pytest.approx(float(expected), abs=1e-13)
    assert float(result["count"]) == items
    assert loss_sum(values.flatten(), mask.flatten())["count"] == mask.sum()
    assert loss_sum(values.bfloat16(), mask)["loss"].dtype == torch.float32
    assert loss_sum(values, mask.double())["count"] == mask.sum()


def test_refusals() -> None:
    values, mask = _values()
    with pytest.raises(ValueError, match="one mask entry for each token"):
        loss_sum(values, mask[:, :4])
    with activate(_context(mask, "sample")), pytest.raises(ValueError, match=r"needs \[B, S\]"):
        loss_sum(values.flatten(), mask.flatten())
    with activate(_context(mask, "sample")), pytest.raises(ValueError, match="4 samples in 4 rows"):
        loss_sum(values[:1], mask[:1])
    context = MicroBatchContext(group=SPGroup(ranks=(0, 1)), weighting="sample")
    with activate(context), pytest.raises(RuntimeError, match="loss_items"):
        loss_sum(values, mask)
