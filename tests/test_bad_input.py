"""Bad input through the whole path: a clear error on every rank within seconds, never a hang, never lost data."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.profile import ProfileError
from tests.fitting import (
    LAYERS,
    Case,
    Data,
    Module,
    RandomPlanner,
    Samples,
    formula_profile,
    make_strategy,
    make_trainer,
)
from tests.pool import Pool, RemoteError
from tests.synthetic import analytic_profile

CASE = Case(world_size=2, samples=10, batch=4, masked="none")


class _Given(DCPDataModule):
    """Whatever dataset a test wants."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(global_batch_size=4, **kwargs)
        self.given = dataset

    def setup(self, stage: str | None = None) -> None:
        self.train_dataset = self.given


class _Faulty(Dataset[dict[str, Any]]):
    """Raises for one sample."""

    def __init__(self, bad: int) -> None:
        self.inner = Samples(CASE)
        self.lengths = self.inner.lengths
        self.bad = bad

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise OSError(f"cannot read sample {index}")
        return self.inner[index]


class _Lying(Samples):
    """Says that a sample is longer than it is."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.lengths = self.lengths.copy()
        self.lengths[3] += 1


def _fit(data: Any, case: Case = CASE, module: Any = None, **strategy: Any) -> Any:
    trainer = make_trainer(make_strategy(case, **strategy), case, devices=case.world_size, max_steps=3)
    trainer.fit(module or Module(case), datamodule=data)
    return trainer


def _raised(pool: Pool, sentence: str, *args: Any, **kwargs: Any) -> None:
    """Every rank raises the sentence; a rank that waits for the others fails the time limit of the pool."""
    with pytest.raises(RemoteError) as caught:
        pool.run(*args, **kwargs, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert sentence in text


def _fit_faulty(workers: int) -> None:
    _fit(_Given(_Faulty(5), num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_in_one_rank_is_an_error_on_all(pool: Pool, workers: int) -> None:
    _raised(pool, "cannot read sample 5", _fit_faulty, 2, workers)


def _fit_lying() -> None:
    _fit(_Given(_Lying(CASE)))


def test_lengths_that_disagree_with_the_data(pool: Pool) -> None:
    length = int(Samples(CASE).lengths[3])
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_lying, 2, timeout=60.0)
    for text in caught.value.tracebacks.values():
        assert "sample 3" in text
        assert str(length) in text
        assert str(length + 1) in text


def _fit_empty() -> None:
    _fit(_Given([]))


def test_an_empty_dataset(pool: Pool) -> None:
    _raised(pool, "empty", _fit_empty, 2)


def _fit_zero_length() -> None:
    samples = Samples(CASE)
    samples.lengths = samples.lengths.copy()
    samples.lengths[7] = 0
    _fit(_Given(samples))


def test_a_sample_of_length_zero(pool: Pool) -> None:
    _raised(pool, "sample 7", _fit_zero_length, 2)


def _fit_too_long() -> None:
    _fit(Data(CASE), planner="balanced", memory_limit="1060KB")


def test_a_sample_that_no_plan_can_hold(pool: Pool) -> None:
    """Names the sample, its length and the limit."""
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_too_long, 2, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        message = text.strip().splitlines()[-1]
        assert "InfeasibleError" in message
        assert "1060000" in message.replace(",", "").replace("_", "")
        assert "tokens" in message


def _fit_foreign_profile() -> None:
    profile = analytic_profile((1, 2), (LAYERS,))
    with pytest.raises(ProfileError, match=r"(?s)measured for something else: .*model: analytic / "):
        _fit(Data(CASE), profile=profile)
    with pytest.raises(ProfileError, match=r"families of \(5,\) layers, the model has \(3,\)"):
        _fit(Data(CASE), profile=formula_profile(2, (5,)))


def test_a_profile_of_another_model(pool: Pool) -> None:
    pool.run(_fit_foreign_profile, 2, timeout=60.0)


def _sizes(world_size: int, asked: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[str]]:
    case = replace(CASE, world_size=world_size, samples=30, batch=10, sp_sizes=asked)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = _fit(Data(case), case)
    strategy: Any = trainer.strategy
    return strategy._prepared.world.sp_sizes, [str(w.message) for w in seen]


@pytest.mark.parametrize(
    ("asked", "used", "said"), [(None, (1, 2), False), ((3,), (1,), True), ((2, 3), (1, 2), True)]
)
def test_a_prime_world_uses_what_its_heads_allow_and_says_what_it_refused(
    pool: Pool, asked: tuple[int, ...] | None, used: tuple[int, ...], said: bool
) -> None:
    """Three does not divide the four heads of the model, so three ranks never work on one sequence."""
    results = pool.run(_sizes, 3, 3, asked, timeout=60.0)
    assert [sizes for sizes, _ in results] == [used] * 3
    messages = [m for _, seen in results for m in seen if "do not divide the attention heads" in m]
    assert len(messages) == said, "said once, on rank 0"
    assert all("sizes [3]" in m and f"used are {list(used)}" in m for m in messages)


class _SevenHeads(Module):
    """Attention with seven heads."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.project = torch.nn.Linear(16, 7 * 4)

    def values(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSC = self.project(self.net.embedding(batch["input_ids"]))
        x_BHSD = x_BSC.unflatten(-1, (7, 4)).transpose(1, 2)
        y_BHSD = torch.nn.functional.scaled_dot_product_attention(x_BHSD, x_BHSD, x_BHSD, is_causal=True)
        return y_BHSD.mean((1, 3)), batch["labels"] != -100


def _seven_heads() -> tuple[tuple[int, ...], list[str], int]:
    case = replace(CASE, world_size=4, samples=30, batch=10)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = _fit(Data(case), case, module=_SevenHeads(case), planner=RandomPlanner(1))
    strategy: Any = trainer.strategy
    return strategy._prepared.world.sp_sizes, [str(w.message) for w in seen], trainer.global_step


def test_heads_that_nothing_divides_fall_back_and_say_so(pool: Pool) -> None:
    """deepspeedai/DeepSpeed#6392."""
    results = pool.run(_seven_heads, 4, timeout=60.0)
    for sizes, _, steps in results:
        assert sizes == (1,)
        assert steps == 3
    messages = [m for _, seen, _ in results for m in seen if "do not divide the attention heads" in m]
    assert len(messages) == 1, "said once, on rank 0"
    assert "(7, 7)" in messages[0]


class _Cross(Module):
    """The tokens attend to three learned places instead of to themselves."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.places = torch.nn.Parameter(torch.randn(1, 4, 3, 4))

    def values(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSC = self.net.embedding(batch["input_ids"])
        x_BHSD = x_BSC.unflatten(-1, (4, 4)).transpose(1, 2)
        places_BHTD = self.places.expand(len(x_BHSD), -1, -1, -1)
        y_BHSD = torch.nn.functional.scaled_dot_product_attention(x_BHSD, places_BHTD, places_BHTD)
        return y_BHSD.mean((1, 3)), batch["labels"] != -100


def _cross() -> tuple[tuple[int, ...], list[str], int]:
    case = replace(CASE, samples=30, batch=10)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = _fit(Data(case), case, module=_Cross(case), planner=RandomPlanner(1))
    strategy: Any = trainer.strategy
    return strategy._prepared.world.sp_sizes, [str(w.message) for w in seen], trainer.global_step


def test_attention_between_different_lengths_is_not_divided_and_says_so(pool: Pool) -> None:
    results = pool.run(_cross, 2, timeout=60.0)
    assert [(sizes, steps) for sizes, _, steps in results] == [((1,), 3)] * 2
    messages = [m for _, seen, _ in results for m in seen if "only self-attention can be divided" in m]
    assert len(messages) == 1, "said once, on rank 0"


def _few() -> tuple[int, list[str], list[int]]:
    case = replace(CASE, world_size=4, samples=2, batch=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = _fit(Data(case), case, planner="balanced")
    strategy: Any = trainer.strategy
    ids = [i for m in strategy.plan.micro_batches for i in m.sample_ids]
    return trainer.global_step, [str(w.message) for w in seen], ids


def test_fewer_samples_than_devices_works_and_warns_once(pool: Pool) -> None:
    results = pool.run(_few, 4, timeout=60.0)
    assert all(steps == 3 and sorted(ids) == [0, 1] for steps, _, ids in results)
    warned = [m for _, seen, _ in results for m in seen if "2 samples" in m or "fewer samples" in m.lower()]
    assert len(warned) == 1


class _MaskOnOneRank(Module):
    """Builds a mask of the local length, as a model does that knows nothing of sharding; only where it sees a pad."""

    def values(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSC = self.net.embedding(batch["input_ids"])
        q_BHSD = x_BSC.unflatten(-1, (4, 4)).transpose(1, 2)
        mask = None
        if not batch["attention_mask"].all():
            s = q_BHSD.shape[2]
            mask = torch.ones(s, s, dtype=torch.bool).tril()
        y = torch.nn.functional.scaled_dot_product_attention(q_BHSD, q_BHSD, q_BHSD, attn_mask=mask)
        return y.mean((1, 3)), batch["labels"] != -100


def _fit_mask_on_one_rank() -> None:
    case = replace(CASE, sp_sizes=(2,))
    _fit(Data(case), case, module=_MaskOnOneRank(case), planner=_Pairs(), profile=formula_profile(2, (LAYERS,)))


class _Pairs(RandomPlanner):
    """Every micro-batch on both ranks."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, request: Any) -> Any:
        wide = tuple(b for b in request.world.blocks if b[1] == 2)
        world = replace(request.world, blocks=wide)
        return super().plan(replace(request, world=world))


def test_a_mask_that_one_shard_refuses_hangs_nobody(pool: Pool) -> None:
    """What one rank finds inside an exchange is raised on both, after the micro-batch."""
    _raised(pool, "mask", _fit_mask_on_one_rank, 2)


def test_numpy_integers_as_lengths_are_welcome() -> None:
    data = Data(CASE)
    data.setup()
    assert data.train_dataloader().shapes.dtype == np.int64


class _Fails(Module):
    """Raises on the rank that gets a certain sample."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            raise ArithmeticError("user code broke")
        return super().training_step(batch, batch_idx)


def _fit_fails() -> tuple[str, str]:
    case = replace(CASE, sp_sizes=(1,))
    try:
        _fit(Data(case), case, module=_Fails(case))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_exception_of_user_code_on_one_rank_ends_all(pool: Pool) -> None:
    """The failing rank raises its own error; the others are told of it and do not wait."""
    first, second = pool.run(_fit_fails, 2, timeout=60.0)
    assert second == ("ArithmeticError", "user code broke")
    assert first[0] == "StepError"
    assert "rank 1: training_step failed on samples" in first[1]
    assert "user code broke" in first[1]


class _Scalar(Module):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))


class _TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class _Frozen(Module):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.requires_grad_(False)


class _FailsAtOnce(Module):
    """Raises on one rank already in the forward that looks for attention heads."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.trainer.global_rank == 1:
            raise ArithmeticError("user code broke")
        return super().training_step(batch, batch_idx)


def _fit_module(kind: str) -> None:
    case = replace(CASE, world_size=2)
    kinds = {"scalar": _Scalar, "two": _TwoOptimizers, "frozen": _Frozen, "first": _FailsAtOnce}
    _fit(Data(case), case, module=kinds[kind](case))


@pytest.mark.feature("Trainer", "parameters without a dimension", "refused: shape `(1,)`")
def test_a_parameter_without_a_dimension_is_named(pool: Pool) -> None:
    _raised(pool, "['temperature'] have no dimension", _fit_module, 2, "scalar")


@pytest.mark.feature("Trainer", "several optimizers", "refused: one optimizer with several groups")
def test_several_optimizers(pool: Pool) -> None:
    _raised(pool, "more than one optimizer", _fit_module, 2, "two")


def test_a_model_without_anything_to_train(pool: Pool) -> None:
    _raised(pool, "no parameter with requires_grad=True", _fit_module, 2, "frozen")


def test_user_code_that_fails_on_one_rank_in_the_first_forward_ends_all(pool: Pool) -> None:
    """It is called in setup, where no step's vote can tell the others."""
    _raised(pool, "user code broke", _fit_module, 2, "first")
