"""The private names of Lightning and DeepSpeed that we touch still exist and still mean what we take them for."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics.classification import BinaryAUROC

from lightning_dcp.data.batch import DCPBatch, StepPlan
from lightning_dcp.logged import Results
from lightning_dcp.logged_epoch import take_over_results
from lightning_dcp.plan import IterationPlan
from lightning_dcp.upstream import (
    ResultCollection,
    check_given_loaders,
    end_by_sigterm,
    fill_lists,
    forget_of_step,
    forget_train_loader,
    is_interactive,
    kept_lists,
    log_of_step,
    logged_by_user,
    notify_sigterm,
    set_closure_loss,
    skip_zero_grad,
    sort_types,
    steps_pass_transfer_hooks,
    watched_at_step,
)


def test_a_replayed_closure_keeps_gradients() -> None:
    cleared: list[int] = []
    closure = Closure(
        step_fn=lambda: ClosureResult(torch.zeros(())), backward_fn=None, zero_grad_fn=lambda: cleared.append(1)
    )
    closure()
    skip_zero_grad(closure)
    closure()
    assert cleared == [1]


def test_the_loss_that_callbacks_see() -> None:
    closure = Closure(step_fn=lambda: ClosureResult(torch.ones(())))
    closure()
    set_closure_loss(closure, torch.tensor(5.0))
    assert float(closure.consume_result().asdict()["loss"]) == 5.0


def test_values_of_a_step_are_logged_as_by_self_log() -> None:
    """Twice under one key, beside a user's value of the same name, in float64."""
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    trainer.fit_loop.epoch_loop._results = results = ResultCollection(training=True)
    trainer.state.stage = "train"  # type: ignore[assignment]
    for value in (1.0, 1.0 + 1e-12):
        log_of_step(trainer, {"a": value, "b": 2.0}, {"b"})
    assert not logged_by_user(trainer, "a")
    shown = results.metrics(on_step=True)
    assert {key: float(value) for key, value in shown["log"].items()} == {"a": 1.0 + 1e-12, "b": 2.0}
    assert shown["pbar"] == {"b": 2.0}
    assert results.metrics(on_step=False)["log"] == {}
    results.reset()
    assert results.metrics(on_step=True)["log"] == {}
    log_of_step(trainer, {"a": 3.0}, set())
    assert results.metrics(on_step=True)["callback"] == {"a": 3.0}
    results.log("training_step", "a", torch.tensor(7.0), on_step=True, on_epoch=False, batch_size=1)
    assert logged_by_user(trainer, "a")
    assert forget_of_step(trainer, "a")
    assert not forget_of_step(trainer, "a")
    assert results.metrics(on_step=True)["callback"] == {"a": 7.0}


def test_whole_steps_pass_the_transfer_hook() -> None:
    class Module(pl.LightningModule):
        def on_before_batch_transfer(self, batch: object, dataloader_idx: int) -> str:
            return "moved"

    module = Module()
    step = DCPBatch(0, 0, StepPlan(IterationPlan(world_size=1, micro_batches=())), ())
    with steps_pass_transfer_hooks(module) as original:
        assert module._on_before_batch_transfer(step, dataloader_idx=0) is step
        assert module._on_before_batch_transfer({"x": 1}, dataloader_idx=0) == "moved"
        assert original(step, 0) == "moved"
    assert "_on_before_batch_transfer" not in module.__dict__


def test_the_order_of_types_on_a_command_line() -> None:
    """The faults are still there, and the cure works; without the faults it can go."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(pl.Trainer, "trainer")
    words = ["--trainer.limit_val_batches=1", "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy"]
    before = parser.parse_args(words).trainer
    assert type(before.limit_val_batches) is float
    assert isinstance(before.strategy, str)
    sort_types(parser)
    after = parser.parse_args(words).trainer
    assert type(after.limit_val_batches) is int
    assert after.strategy.class_path == "lightning.pytorch.strategies.DDPStrategy"
    others = parser.parse_args(["--trainer.limit_val_batches=1.0", "--trainer.strategy=ddp"]).trainer
    assert type(others.limit_val_batches) is float
    assert others.strategy == "ddp"


def test_names_of_deepspeed() -> None:
    for name in ("set_gradient_accumulation_boundary", "allreduce_gradients", "backward", "step"):
        assert callable(getattr(DeepSpeedEngine, name))
    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
    assert "__compatible_ops__" in inspect.getsource(build_shm_op)
    for name in ("setup_buckets", "get_param_gradient_attribute", "fill_grad_accum_attribute", "zero_grad"):
        assert callable(getattr(DeepSpeedZeroOptimizer, name))
    zero = inspect.getsource(DeepSpeedZeroOptimizer)
    assert "bit16_groups" in zero
    assert "use_grad_accum_attribute" in zero
    half = inspect.getsource(BF16_Optimizer)
    for name in ("bf16_groups", "fp32_groups_gradients", "fp32_groups_has_gradients"):
        assert name in half


def test_what_we_skip_of_the_parent_is_only_its_check_for_cuda() -> None:
    source = inspect.getsource(DeepSpeedStrategy.setup_environment)
    assert "CUDAAccelerator" in source
    assert source.count("super().setup_environment()") == 1
    assert len(source.strip().splitlines()) <= 10, "DeepSpeedStrategy.setup_environment does more than it used to"
    assert callable(DDPStrategy.setup_environment)


def test_names_for_launching() -> None:
    """Handlers are looked up on the instance when they are registered, after the strategy joined its process group."""
    import deepspeed.comm.comm
    import deepspeed.utils.groups
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    assert isinstance(is_interactive(), bool)
    assert deepspeed.utils.groups._WORLD_GROUP is None or deepspeed.comm.comm.cdb is not None
    assert "[self._sigterm_notifier_fn]" in inspect.getsource(_SignalConnector.register_signal_handlers)
    run = inspect.getsource(pl.Trainer._run)
    assert run.index("strategy.setup_environment()") < run.index("register_signal_handlers()")
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    answers = iter([True, False])
    notify_sigterm(trainer, lambda: next(answers))
    seen = []
    for _ in range(2):
        trainer._signal_connector._sigterm_notifier_fn(15, None)  # type: ignore[arg-type]
        seen.append(trainer.received_sigterm)
    assert seen == [False, True]
    other = pl.Trainer(accelerator="cpu", logger=False)
    end_by_sigterm(other)
    assert other.received_sigterm


def test_what_the_fit_loop_asks_again_for() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop
    assert "if self._combined_loader is not None and not self._should_reload_train_dl" in inspect.getsource(
        loop.setup_data
    )
    loop._combined_loader = CombinedLoader([1])
    forget_train_loader(trainer)
    assert loop._combined_loader is None
    assert CombinedLoader([1], "sequential")._mode == "sequential"
    seen: list[Any] = []
    for fn, given, expected in (("fit", [1], [[1]]), ("validate", [1], []), ("fit", None, [])):
        trainer.state.fn = TrainerFn(fn)
        trainer._data_connector.attach_data(pl.LightningModule(), train_dataloaders=given)
        check_given_loaders(trainer, seen.append)
        assert seen == expected, fn
        seen.clear()


def test_names_of_the_evaluation_loops() -> None:
    for kind, name in ((_EvaluationLoop, "_evaluation_step"), (_PredictionLoop, "_predict_step")):
        names = list(inspect.signature(getattr(kind, name)).parameters)
        assert names == ["self", "batch", "batch_idx", "dataloader_idx", "dataloader_iter"]
        assert f"self.{name}(" in inspect.getsource(kind)
    predicting = inspect.getsource(_PredictionLoop._predict_step)
    assert "self._predictions[dataloader_idx].append" in predicting
    writing = inspect.getsource(_PredictionLoop._store_data_for_prediction_writer)
    assert "self.epoch_batch_indices[dataloader_idx].append" in writing
    assert "_IndexBatchSamplerWrapper" in inspect.getsource(_PredictionLoop._get_batch_indices)
    assert CombinedLoader([[1]], "sequential")._mode == "sequential"


def test_names_behind_logged_values() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(monitor="x", every_n_train_steps=2)]
    )
    # Called on all ranks before any hook reads the results of an epoch.
    for end in (_FitLoop.on_advance_end, _EvaluationLoop.on_run_end):
        source = inspect.getsource(end)
        hooks = "_call_callback_hooks" if "_call_callback_hooks" in source else "_on_evaluation_epoch_end()"
        assert source.index("epoch_end_reached()") < source.index(hooks)
    take_over_results(trainer)
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.test_loop):
        assert isinstance(loop._results, Results)
    assert watched_at_step(trainer) == frozenset()  # the next step is the first
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 1
    assert watched_at_step(trainer) == {"x"}
    results = trainer.fit_loop.epoch_loop._results
    results.log("training_step", "y", torch.tensor(2.0), on_step=True, on_epoch=True, batch_size=1)
    result = results["training_step.y"]
    assert (result._forward_cache, result._computed, result._update_count) == (2.0, None, 1)
    area = BinaryAUROC()
    area.update(torch.tensor([0.5]), torch.tensor([1]))
    assert kept_lists(area) == {"preds": (torch.float32, ()), "target": (torch.int64, ())}
    fill_lists(empty := BinaryAUROC(), kept_lists(area))
    assert empty.target[0].dtype == torch.int64
