"""One micro-batch: what ``training_step`` may return, shards without an item, and what must never pass silently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_dcp.execution import LossSettings, MicroBatchRunner
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.recompute import RecomputeSwitch
from lightning_dcp.sequence_parallel import current
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from tests.fitting import (
    Case,
    Data,
    Module,
    assert_same_updates,
    fit_single,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.fitting import Result as FitResult
from tests.pool import Pool, RemoteError

ORIGINAL = F.scaled_dot_product_attention


class Fixed:
    """Sample 0 over both ranks, 1 on rank 0, 2 and 3 together on rank 1."""

    name, draws, lockstep = "fixed", False, False

    def plan(self, request: PlanRequest) -> IterationPlan:
        shapes = dict(zip(request.ids, request.sizes, strict=True))

        def row(ids: tuple[int, ...], first: int, size: int) -> MicroBatch:
            longest = max(shapes[i][0] for i in ids)
            return MicroBatch(
                sample_ids=ids,
                shapes=tuple(shapes[i] for i in ids),
                padded_shape=(-(-longest // size) * size,),
                first_rank=first,
                sp_size=size,
                nanoseconds=1,
                bytes=1,
            )

        rows = (row((0,), 0, 2), row((1,), 0, 1), row((2, 3), 1, 1))
        return IterationPlan(world_size=2, micro_batches=rows)


CASE = Case(world_size=2, samples=4, batch=4, steps=3, masked="none", seed=8)
# What is masked: the first shard of sample 0, the micro-batch of sample 1, all that rank 1 has alone.
MASKED = {
    "shard": {0: 0.6},
    "micro-batch": {1: 1.0},
    "rank": {2: 1.0, 3: 1.0},
    "everything": dict.fromkeys(range(4), 1.0),
}


class MaskedData(Data):
    """The samples with leading labels ignored."""

    def __init__(self, case: Case, share: dict[int, float]) -> None:
        super().__init__(case)
        self.share = share

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        mask_rows(self.train_dataset.rows, self.share)


def mask_rows(rows: list[dict[str, Any]], share: dict[int, float]) -> None:
    for index, part in share.items():
        length = len(rows[index]["labels"])
        rows[index]["labels"][: round(part * length)] = -100


class Unsafe(Module):
    """The mean that divides by the number of valid labels: 0 / 0 in an empty shard, with a gradient of NaN."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        # Not by ignore_index: cross_entropy would stop the NaN at the positions that it ignores.
        values_BS, _ = self.values({**batch, "labels": batch["labels"].clamp(min=0)})
        mask_BS = batch["labels"] != -100
        return (values_BS * mask_BS).sum() / mask_BS.sum()


def _fit(case: Case, share: dict[int, float], unsafe: bool = False) -> FitResult:
    module = (Unsafe if unsafe else Module)(case)
    start = weights_of(module)
    trainer = make_trainer(make_strategy(case, planner=Fixed()), case, devices=2)
    trainer.fit(module, datamodule=MaskedData(case, share))
    plans = [trainer.strategy.plan.to_json()]  # type: ignore[attr-defined]
    return FitResult(start=start, weights=weights_of(module), losses=module.losses, plans=plans)


@pytest.mark.parametrize("returns", ["mean", "sum", "dict", "loss_sum"])
@pytest.mark.parametrize("masked", ["shard", "micro-batch", "rank"])
def test_parts_without_a_label_contribute_exactly_zero(
    pool: Pool, masked: str, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """allenai/OLMo-core#657, PrimeIntellect-ai/prime-rl#1957."""
    case = replace(CASE, returns=returns)
    results = pool.run(_fit, 2, case, MASKED[masked], timeout=60.0)
    import tests.fitting as fitting

    class Masked(fitting.Samples):
        def __init__(self, case: Case) -> None:
            super().__init__(case)
            mask_rows(self.rows, MASKED[masked])

    monkeypatch.setattr(fitting, "Samples", Masked)
    expected = fit_single(case, results[0].plans * case.steps)
    for result in results:
        assert all(loss == loss for loss in result.losses), "the reported loss is NaN"
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_updates(result, expected)


@pytest.mark.parametrize("returns", ["mean", "sum", "dict", "loss_sum"])
def test_a_step_without_any_label_changes_nothing(pool: Pool, returns: str) -> None:
    for result in pool.run(_fit, 2, replace(CASE, returns=returns), MASKED["everything"], timeout=60.0):
        assert result.losses == [0.0] * CASE.steps
        assert all(torch.equal(result.start[n], w) for n, w in result.weights.items())


def test_a_mean_that_divides_by_zero_is_named_on_all_ranks(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit, 2, CASE, MASKED["shard"], True, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "rank 0: samples (0,): this shard has no valid label" in text
        assert "loss_sum" in text


def _uneven_sample_weighting() -> FitResult:
    return _fit(replace(CASE, weighting="sample"), {})


def test_a_plain_mean_cannot_be_weighted_by_sample(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_uneven_sample_weighting, 2, timeout=60.0)
    for text in caught.value.tracebacks.values():
        assert (
            "samples (2, 3): samples (2, 3) have different numbers" in text or "different numbers of valid" in text
        )
        assert "loss_sum(values_BS, mask_BS)" in text


class _Eager(Module):
    """Attention written out, which nothing can intercept."""

    def values(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSC = self.net.embedding(batch["input_ids"])
        weights = (x_BSC @ x_BSC.transpose(1, 2)).softmax(-1)
        return (weights @ x_BSC).mean(-1), batch["labels"] != -100


def _step(kind: str) -> dict[str, Any]:
    """One micro-batch of both ranks, outside of the Trainer."""
    rank = dist.get_rank()
    data = Data(CASE)
    data.setup()
    module = (_Eager if kind == "eager" else Module)(CASE)
    groups = ProcessGroups([(0, 2), (0, 1), (1, 1)])
    groups.ensure()
    runner = MicroBatchRunner(
        module=module,
        groups=groups,
        recompute=RecomputeSwitch(()),
        hooks=data,
        seed=0,
    )
    shape = (int(data.train_dataset.lengths[0]),)
    size, first = (1, rank) if kind == "single" else (2, 0)
    padded = (-(-shape[0] // 2) * 2,)
    micro_batch = MicroBatch(
        sample_ids=(0,),
        shapes=(shape,),
        padded_shape=padded,
        first_rank=first,
        sp_size=size,
        nanoseconds=1,
        bytes=1,
    )
    inside = None
    with runner.step(micro_batch, data.train_dataloader().load(micro_batch)) as outcome:
        inside = F.scaled_dot_product_attention is not ORIGINAL
        group = current().group.size
    return {
        "failures": outcome.context.failures,
        "interceptions": outcome.context.interceptions,
        "patched": inside,
        "group": group,
        "patched_after": F.scaled_dot_product_attention is not ORIGINAL,
        "group_after": current().group.size,
    }


def test_no_interception_at_a_size_above_one_is_an_error(pool: Pool) -> None:
    for answer in pool.run(_step, 2, "eager"):
        assert len(answer["failures"]) == 1
        assert "each rank attended to its shard only" in answer["failures"][0]
        assert "sp_sizes=[1]" in answer["failures"][0]


def test_the_patch_lasts_for_the_micro_batch_only(pool: Pool) -> None:
    for answer in pool.run(_step, 2, "shared"):
        assert answer["failures"] == []
        assert answer["interceptions"] == 3
        assert (answer["patched"], answer["group"]) == (True, 2)
        assert (answer["patched_after"], answer["group_after"]) == (False, 1)


def test_nothing_is_patched_at_size_one(pool: Pool) -> None:
    for answer in pool.run(_step, 2, "single"):
        assert answer["patched"] is False
        assert answer["interceptions"] == 0
        assert answer["failures"] == []


GRADIENT = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (torch.zeros(3), r"tensor of shape \(3,\)"),
        ({"count": 1}, "keys \\['count'\\]"),
        (1.0, "1.0"),
        ({"loss": GRADIENT, "count": -1}, '"count" -1'),
        ({"loss": GRADIENT, "count": float("nan")}, '"count" nan'),
        ({"loss": GRADIENT, "count": "3"}, "\"count\" '3'"),
        ({"loss": GRADIENT, "count": None}, '"count" None'),
        ({"loss": GRADIENT, "count": torch.ones(2)}, '"count" a tensor of shape \\(2,\\)'),
    ],
)
def test_what_training_step_may_not_return(value: Any, words: str) -> None:
    data = Data(CASE)
    data.setup()

    class Returns(Module):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return value

    runner = MicroBatchRunner(
        module=Returns(CASE), groups=ProcessGroups([(0, 1)]), recompute=RecomputeSwitch(()), hooks=data, seed=0
    )
    micro_batch = (
        Fixed()
        .plan(
            PlanRequest(
                sample_ids=(0, 1, 2, 3),
                shapes=tuple((int(n),) for n in data.train_dataset.lengths),
                cost=None,  # type: ignore[arg-type]
                world=None,  # type: ignore[arg-type]
                limits=None,  # type: ignore[arg-type]
            )
        )
        .micro_batches[1]
    )
    batch = data.train_dataloader().load(micro_batch)
    with (
        pytest.raises(ValueError, match=f"training_step returned .*{words}.*(return a|it must be)"),
        runner.step(micro_batch, batch),
    ):
        pass


class _WrongCount(Module):
    """Tensors as counts are not looked at before the step is over."""

    def __init__(self, case: Case, count: float) -> None:
        super().__init__(case)
        self.wrong = count

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        values_BS, mask_BS = self.values(batch)
        count = mask_BS.sum() if self.trainer.global_rank == 0 else torch.tensor(self.wrong)
        return {"loss": (values_BS * mask_BS).sum(), "count": count}


def _fit_wrong_count(count: float) -> None:
    case = replace(CASE, masked="none")
    make_trainer(make_strategy(case, planner=Fixed()), case, devices=2).fit(
        _WrongCount(case, count), datamodule=Data(case)
    )


@pytest.mark.parametrize("count", [float("nan"), -1e4, float("inf")])
def test_counts_that_add_up_to_no_number_of_items_end_all_ranks(pool: Pool, count: float) -> None:
    """They would leave the weight of the step wrong, without a word."""
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_wrong_count, 2, count, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "the counts that training_step returned add up to" in text


class _WithoutGradient(Module):
    how = "detached"

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"detached": loss.detach(), "whole": torch.tensor(3), "complex": loss.to(torch.complex64)}[self.how]


def _fit_without_gradient(how: str) -> None:
    module = _WithoutGradient(CASE)
    module.how = how
    make_trainer(make_strategy(CASE, planner=Fixed()), CASE, devices=2).fit(module, datamodule=Data(CASE))


@pytest.mark.parametrize("how", ["detached", "whole", "complex"])
def test_a_loss_without_a_gradient_is_named(pool: Pool, how: str) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_without_gradient, 2, how, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "through which no gradient flows" in text


class _WrongItems(Data):
    def loss_items(self, batch: Any) -> int:
        return -3


def _fit_wrong_items() -> None:
    make_trainer(make_strategy(CASE, planner=Fixed()), CASE, devices=2).fit(
        Module(CASE), datamodule=_WrongItems(CASE)
    )


def test_a_negative_number_of_items_is_refused(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_wrong_items, 2, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "loss_items returned -3.0; it must be the number of items" in text


class _NoIndex(Module):
    """``batch_idx`` is optional for the Trainer, so it is for us."""

    def training_step(self, batch: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def _fit_no_index(plain: bool) -> list[float]:
    case = replace(CASE, self_check=True, samples=8)
    module = (Module if plain else _NoIndex)(case)
    make_trainer(make_strategy(case), case, devices=2).fit(module, datamodule=Data(case))
    return module.losses


def test_a_training_step_without_an_index(pool: Pool) -> None:
    """The self-check and the search for heads call it too, outside of the Trainer."""
    assert pool.run(_fit_no_index, 2, False, timeout=60.0) == pool.run(_fit_no_index, 2, True, timeout=60.0)


class _Thousandths(Module):
    """Every item weighs a thousandth, so that all items of a step together are less than one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        values_BS, mask_BS = self.values(batch)
        weights_BS = mask_BS * 1e-3
        return {"loss": (values_BS * weights_BS).sum(), "count": weights_BS.sum()}


def _fit_thousandths() -> FitResult:
    case = CASE
    module = _Thousandths(case)
    start = weights_of(module)
    trainer = make_trainer(make_strategy(case, planner=Fixed()), case, devices=2)
    trainer.fit(module, datamodule=Data(case))
    plans = [trainer.strategy.plan.to_json()] * case.steps  # type: ignore[attr-defined]
    return FitResult(start=start, weights=weights_of(module), losses=module.losses, plans=plans)


def test_a_count_below_one_is_a_count(pool: Pool) -> None:
    for result in pool.run(_fit_thousandths, 2, timeout=60.0):
        expected = fit_single(CASE, result.plans)
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_updates(result, expected)


OTHER = replace(CASE, weighting="sample", returns="loss_sum", masked="prompts", seed=2)


class _OtherData(Data):
    """Labels of another name, with another number for those that do not count."""

    def __init__(self, case: Case, key: str) -> None:
        super().__init__(case, labels_key=key, ignore_index=-7)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        for row in self.train_dataset.rows:
            labels = row.pop("labels")
            row[self.rules.labels_key] = labels.masked_fill(labels == -100, -7)


class _OtherLabels(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        labels_BS = batch["labels" if "labels" in batch else "targets"]
        return super().training_step({**batch, "labels": labels_BS.masked_fill(labels_BS == -7, -100)}, batch_idx)


def _fit_other_labels(key: str) -> FitResult:
    module = _OtherLabels(OTHER)
    start = weights_of(module)
    trainer = make_trainer(make_strategy(OTHER, planner=Fixed()), OTHER, devices=2)
    trainer.fit(module, datamodule=_OtherData(OTHER, key))
    plans = [trainer.strategy.plan.to_json()] * OTHER.steps  # type: ignore[attr-defined]
    return FitResult(start=start, weights=weights_of(module), losses=module.losses, plans=plans)


@pytest.mark.parametrize("key", ["labels", "targets"])
def test_samples_are_weighted_by_the_labels_that_the_data_module_names(pool: Pool, key: str) -> None:
    for result in pool.run(_fit_other_labels, 2, key, timeout=60.0):
        expected = fit_single(OTHER, result.plans)
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_updates(result, expected)


def _dropout(seed: int, first: int) -> torch.Tensor:
    data = Data(CASE)
    data.setup()
    seen: list[torch.Tensor] = []

    class Draws(Module):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            seen.append(F.dropout(torch.ones(64), 0.5))
            return super().training_step(batch, batch_idx)

    runner = MicroBatchRunner(
        module=Draws(CASE),
        groups=ProcessGroups([(0, 1)]),
        recompute=RecomputeSwitch(()),
        hooks=data,
        seed=seed,
        loss=LossSettings(),
    )
    shape = (int(data.train_dataset.lengths[first]),)
    micro_batch = MicroBatch(
        sample_ids=(first,), shapes=(shape,), padded_shape=shape, first_rank=0, sp_size=1, nanoseconds=1, bytes=1
    )
    batch = data.train_dataloader().load(micro_batch)
    before = torch.random.get_rng_state()
    with runner.step(micro_batch, batch):
        pass
    assert torch.equal(before, torch.random.get_rng_state())
    return seen[0]


def test_dropout_depends_on_the_micro_batch_and_leaves_the_users_numbers_alone() -> None:
    first, again, other, reseeded = (_dropout(*a) for a in ((0, 1), (0, 1), (0, 2), (1, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, reseeded)
