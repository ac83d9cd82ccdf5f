"""The Trainer's loop under plans of changing length: counters, schedules, logging, validation, checkpoint intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import PlanRequest
from tests.fitting import (
    Case,
    Data,
    Module,
    Samples,
    fit_single,
    formula_profile,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool


class Script:
    """Per step the number of micro-batches of each rank, repeated over the steps of an epoch; one sample each."""

    name, draws, lockstep = "script", False, False

    def __init__(self, *counts: tuple[int, ...], samples: int) -> None:
        self.counts = counts
        self.samples = samples

    def plan(self, request: PlanRequest) -> IterationPlan:
        # The step's number is not part of a request, on purpose; here it hides in the number of samples.
        counts = next(c for c in self.counts if sum(c) == len(request.sample_ids))
        ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
        rows = [
            MicroBatch(
                sample_ids=(i,),
                shapes=(shape,),
                padded_shape=shape,
                first_rank=rank,
                sp_size=1,
                recompute=(index % 2,),
                nanoseconds=1,
                bytes=1,
            )
            for index, (i, shape, rank) in enumerate(zip(request.ids, request.sizes, ranks, strict=True))
        ]
        return IterationPlan(world_size=len(counts), micro_batches=tuple(rows))


class Recorder(pl.Callback):
    """Notes what happens around each step."""

    def __init__(self) -> None:
        self.forwards = 0
        self.forwards_at_step: list[int] = []
        self.zero_grads = 0
        self.optimizer_steps = 0
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.validations: list[int] = []
        self.consumed_before: list[int] = []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.zero_grads += 1

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        self.optimizer_steps += 1
        self.consumed_before.append(trainer.strategy.consumed_samples)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.forwards_at_step.append(pl_module.forwards)  # type: ignore[arg-type]
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)


class Scheduled(Module):
    """Counts its forwards and has a schedule that moves at every optimizer step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.forwards = 0
        self.validated: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.forwards += 1
        self.log("constant", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        values_BS, mask_BS = self.values(batch)
        self.log("val_loss", (values_BS * mask_BS).sum(), sync_dist=True, batch_size=len(values_BS))
        if batch_idx == 0:
            self.validated.append(weights_of(self))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ValidatedData(Data):
    """Two validation batches a rank."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.val_dataset = self.train_dataset


def _fit(case: Case, planner: Any, **kwargs: Any) -> dict[str, Any]:
    recorder = Recorder()
    module = Scheduled(case)
    callbacks = [recorder, *kwargs.pop("callbacks", [])]
    trainer = make_trainer(
        make_strategy(case, planner=planner), case, devices=case.world_size, callbacks=callbacks, **kwargs
    )
    trainer.fit(module, datamodule=ValidatedData(case))
    weights = weights_of(module)
    return {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "forwards": recorder.forwards_at_step,
        "zero_grads": recorder.zero_grads,
        "optimizer_steps": recorder.optimizer_steps,
        "lrs": recorder.lrs,
        "losses": recorder.losses,
        "validations": recorder.validations,
        "validated": module.validated,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "weights": weights,
        "consumed": (trainer.strategy.consumed_samples, trainer.strategy.consumed_tokens),  # type: ignore[attr-defined]
        "consumed_before": recorder.consumed_before,
        "outputs": module.losses,
    }


# Steps of 4, 4 and 2 samples; rank 0 runs 3, 3, 1 micro-batches and rank 1 runs 1, 1, 1.
TWO_RANKS = Case(world_size=2, samples=10, batch=4, steps=-1, masked="none", lr=1.0)
UNEVEN = Script((3, 1), (1, 1), samples=10)


@pytest.mark.feature("Trainer", "schedules per step", "one move per optimizer step")
def test_counters_schedules_and_logging_follow_optimizer_steps(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#21534, #831, #1476, #5680, #19779, #21491; deepspeedai/DeepSpeed#8183."""
    results = pool.run(_fit, 2, TWO_RANKS, UNEVEN, max_epochs=2, limit_val_batches=0, timeout=120.0)
    for rank, result in enumerate(results):
        assert result["global_step"] == 6
        assert result["forwards"] == [[3, 6, 7, 10, 13, 14], [1, 2, 3, 4, 5, 6]][rank]
        assert result["zero_grads"] == 6, "gradients are cleared once a step"
        assert result["optimizer_steps"] == 6
        assert result["lrs"] == [0.5**k for k in range(1, 7)], "one schedule step per optimizer step"
        assert result["metrics"]["constant_step"] == 1.0
        assert result["metrics"]["constant_epoch"] == 1.0
        assert result["losses"] == pytest.approx(result["outputs"], rel=1e-6)
        assert result["losses"] == results[0]["losses"]
        assert result["consumed"][0] == 20
        # A checkpoint that is written now must not lead behind a step that the weights have not seen.
        assert result["consumed_before"] == [0, 4, 8, 10, 14, 18]
    assert results[0]["consumed"] == results[1]["consumed"]


@pytest.mark.feature("Trainer", "`max_epochs`, `max_steps`", "in optimizer steps")
@pytest.mark.parametrize("max_steps", [1, 3, 4])
def test_max_steps_counts_optimizer_steps(pool: Pool, max_steps: int) -> None:
    """Lightning-AI/pytorch-lightning#4193."""
    results = pool.run(_fit, 2, TWO_RANKS, UNEVEN, max_steps=max_steps, limit_val_batches=0, timeout=120.0)
    assert [r["global_step"] for r in results] == [max_steps, max_steps]


@pytest.mark.feature("Trainer", "`limit_train_batches`, `fast_dev_run`")
@pytest.mark.parametrize(("kwargs", "steps"), [({"limit_train_batches": 2}, 2), ({"fast_dev_run": 1}, 1)])
def test_limits_of_the_trainer(pool: Pool, kwargs: dict[str, Any], steps: int) -> None:
    results = pool.run(_fit, 2, TWO_RANKS, UNEVEN, **{"max_epochs": 1, **kwargs}, timeout=120.0)
    assert [r["global_step"] for r in results] == [steps, steps]


@pytest.mark.feature("Trainer", "`val_check_interval`", "number or share, in optimizer steps")
@pytest.mark.parametrize(("interval", "steps", "expected"), [(2, 4, [2, 4]), (0.5, 4, [2, 4]), (1.0, 3, [3])])
def test_validation_falls_between_steps(pool: Pool, interval: float, steps: int, expected: list[int]) -> None:
    """Lightning-AI/pytorch-lightning#12205, #19740: uneven ranks enter validation together, at whole steps."""
    case = replace(TWO_RANKS, samples=4 * steps)
    planner = Script((3, 1), (1, 3), samples=case.samples)
    results = pool.run(
        _fit, 2, case, planner, max_epochs=1, val_check_interval=interval, num_sanity_val_steps=1, timeout=120.0
    )
    for result in results:
        assert result["validations"] == expected
        assert len(result["validated"]) == len(expected) + 1, "the sanity check and one for each validation"
    for ours, theirs in zip(results[0]["validated"], results[1]["validated"], strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), "validated in mid-step"


@pytest.mark.feature("Callbacks", "`ModelCheckpoint`", "`every_n_train_steps` counts optimizer steps")
def test_checkpoints_by_optimizer_steps(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#17903."""
    pool.run(_fit_checkpoints, 2, str(tmp_path), timeout=120.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]


def _fit_checkpoints(folder: str) -> None:
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    _fit(
        TWO_RANKS,
        UNEVEN,
        max_epochs=2,
        max_steps=5,
        callbacks=[saver],
        enable_checkpointing=True,
        limit_val_batches=0,
    )


class _Steps(Logger):
    """Keeps every call of ``log_metrics``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, float], int]] = []

    @property
    def name(self) -> str:
        return "steps"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.calls.append((metrics, step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def _fit_logged() -> list[tuple[dict[str, float], int]]:
    logger = _Steps()
    _fit(
        TWO_RANKS,
        UNEVEN,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor("step")],
        limit_val_batches=0,
    )
    return logger.calls


@pytest.mark.feature("Callbacks", "`LearningRateMonitor`")
def test_one_axis_for_all_loggers(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#5405."""
    calls = pool.run(_fit_logged, 2, timeout=120.0)[0]
    steps = [step for _, step in calls]
    assert steps == sorted(steps)
    ours = [(m, step) for m, step in calls if "dcp/idle_planned" in m]
    assert [step for _, step in ours] == list(range(6))
    expected = {"loss", "dcp/tokens_per_second", "dcp/idle_planned", "dcp/idle_measured", "dcp/padding"}
    expected |= {"dcp/mean_sp_size", "dcp/mean_micro_batches", "dcp/mean_recompute"}
    for metrics, _ in ours:
        assert expected <= metrics.keys()
        assert 0.0 <= metrics["dcp/idle_measured"] <= 1.0


def _collectives_per_step(counts: tuple[int, int]) -> list[int]:
    """World collectives between two steps, by the number of micro-batches."""
    calls: list[str] = []
    originals = {
        name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter_tensor", "all_gather", "reduce")
    }

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    class Marks(pl.Callback):
        def __init__(self) -> None:
            self.inside = False
            self.in_step: list[int] = []

        def on_before_backward(self, *args: Any) -> None:
            self.before = len(calls)

        def on_after_backward(self, *args: Any) -> None:
            assert len(calls) == self.before, "a collective ran inside a backward"

        def on_train_batch_end(self, *args: Any) -> None:
            self.in_step.append(len(calls))

    marks = Marks()
    samples = sum(counts)
    case = Case(world_size=2, samples=3 * samples, batch=samples, steps=3, masked="none")
    for name in originals:
        setattr(dist, name, counted(name))
    try:
        trainer = make_trainer(
            make_strategy(case, planner=Script(counts, samples=samples)), case, devices=2, callbacks=[marks]
        )
        trainer.fit(Module(case), datamodule=Data(case))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return [b - a for a, b in zip(marks.in_step, marks.in_step[1:], strict=False)]


def test_one_reduction_a_step_whatever_its_length(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#4092, verl-project/verl#6176."""
    short = pool.run(_collectives_per_step, 2, (1, 1), timeout=120.0)
    long = pool.run(_collectives_per_step, 2, (4, 1), timeout=120.0)
    assert short == long
    assert short[0][0] >= 3, "the two agreements and the reduction were not seen, so nothing was counted"


class _Constant(pl.LightningModule):
    """The gradient of its one weight is 1 for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.trained: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.trained.append(float(self.weight[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _fit_constant() -> list[float]:
    case = Case(world_size=1, samples=10, batch=4, steps=-1, masked="none")
    module = _Constant()
    strategy = make_strategy(case, planner=_Flat((4,), (2,)), profile=formula_profile(1, ()))
    make_trainer(strategy, case, devices=1, max_epochs=1).fit(module, datamodule=Data(case))
    return module.trained


class _Flat(Script):
    def __init__(self, *counts: tuple[int, ...]) -> None:
        super().__init__(*counts, samples=0)

    def plan(self, request: PlanRequest) -> IterationPlan:
        plan = super().plan(request)
        rows = tuple(replace(m, recompute=()) for m in plan.micro_batches)
        return IterationPlan(world_size=plan.world_size, micro_batches=rows)


def test_gradients_of_a_short_last_step(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#19987, #21808: windows of 4, 4 and 2 micro-batches all see the gradient 1."""
    assert pool.run(_fit_constant, 1, timeout=120.0) == [[-1.0, -2.0, -3.0]]


@pytest.mark.feature("Trainer", "`CSVLogger`")
def test_the_logged_loss_of_a_run_equals_a_single_process(pool: Pool, tmp_path: Path) -> None:
    """The CSV file that a user looks at holds the exact mean of each step."""
    case = Case(world_size=2, seed=3, steps=4)
    plans = pool.run(_fit_csv, 2, case, str(tmp_path), timeout=120.0)[0]
    lines = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("loss")
    logged = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    assert logged == pytest.approx(fit_single(case, plans).losses, rel=1e-5)


def _fit_csv(case: Case, folder: str) -> list[str]:
    plans: list[str] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]

    trainer = make_trainer(
        make_strategy(case),
        case,
        devices=2,
        callbacks=[Keep()],
        logger=CSVLogger(folder, name="csv"),
        log_every_n_steps=1,
    )
    trainer.fit(Module(case), datamodule=Data(case))
    return plans


class _TokenData(Data):
    """Steps of a number of tokens: their number differs between epochs."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, tokens=60)


def _fit_tokens(folder: str, resume: str | None) -> list[tuple[int, list[int]]]:
    case = Case(world_size=2, samples=14, steps=-1, seed=9)
    trained: list[tuple[int, list[int]]] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            plan = trainer.strategy.plan  # type: ignore[attr-defined]
            ids = [i for m in plan.micro_batches for i in m.sample_ids]
            trained.append((trainer.current_epoch, sorted(ids)))

    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        make_strategy(case), case, devices=2, max_epochs=3, callbacks=[Keep(), saver], enable_checkpointing=True
    )
    trainer.fit(Module(case), datamodule=_TokenData(case), ckpt_path=resume)
    return trained


def test_steps_of_a_number_of_tokens(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#18023: every epoch runs to its end, also when resumed in its middle."""
    whole = pool.run(_fit_tokens, 2, str(tmp_path), None, timeout=120.0)
    assert whole[0] == whole[1]
    lengths = Samples(Case(samples=14, seed=9)).lengths
    for epoch in range(3):
        steps = [ids for e, ids in whole[0] if e == epoch]
        assert sorted(i for ids in steps for i in ids) == list(range(14))
        assert all(len(ids) == 1 or sum(int(lengths[i]) for i in ids) <= 60 for ids in steps)
    assert len({sum(e == epoch for e, _ in whole[0]) for epoch in range(3)}) > 1, "the epochs are equally long"
    for step in (1, 5):
        again = pool.run(
            _fit_tokens, 2, str(tmp_path / "again"), str(tmp_path / f"step={step}.ckpt"), timeout=120.0
        )
        assert again[0] == whole[0][step:]


class _WrappedClosure(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=lambda: optimizer_closure())


def _fit_wrapped_closure() -> None:
    case = Case(world_size=1)
    with pytest.raises(MisconfigurationException, match=r"(?s)got the closure .*allowed is the optimizer_closure"):
        make_trainer(make_strategy(case), case, devices=1).fit(_WrappedClosure(case), datamodule=Data(case))


@pytest.mark.feature(
    "Trainer",
    "`optimizer_step` override that wraps the closure",
    "refused: call `optimizer.step(closure=optimizer_closure)`",
)
def test_a_wrapped_closure_is_refused_since_it_would_clear_gradients(pool: Pool) -> None:
    pool.run(_fit_wrapped_closure, 1, timeout=60.0)


def test_a_loader_that_is_none_of_ours_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="got no DCPLoader for training.*DCPDataModule"):
        pool.run(_fit_plain_loader, 1, timeout=60.0)


def _fit_plain_loader() -> None:
    case = Case(world_size=1)
    trainer = make_trainer(make_strategy(case), case, devices=1)
    trainer.fit(Module(case), (batch for batch in [1, 2, 3]))
