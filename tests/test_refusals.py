"""What cannot work is refused in one sentence, before a process group exists."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dcp.engine import EngineConfigError
from lightning_dcp.refusals import SUPPORTED_PRECISIONS
from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Case, Data, Module, make_trainer

CASE = Case(world_size=1)


class _Manual(Module):
    def __init__(self) -> None:
        super().__init__(CASE)
        self.automatic_optimization = False


def _refused(sentence: str, module: pl.LightningModule | None = None, **kwargs: Any) -> None:
    trainer = make_trainer(DCPStrategy(), CASE, devices=1, **kwargs)
    with pytest.raises(MisconfigurationException, match=sentence):
        trainer.fit(module or Module(CASE), datamodule=Data(CASE))
    assert not dist.is_initialized(), "refused too late: a process group exists"


@pytest.mark.feature("Trainer", "`accumulate_grad_batches`", "refused: set `DCPDataModule(global_batch_size=...)`")
def test_accumulation() -> None:
    """Lightning-AI/pytorch-lightning#19891."""
    _refused(r"accumulate_grad_batches=4.*only 1 is allowed.*global_batch_size", accumulate_grad_batches=4)


@pytest.mark.feature("Trainer", "manual optimization", "refused: return the loss")
def test_manual_optimization() -> None:
    """Lightning-AI/pytorch-lightning#7970."""
    _refused("automatic_optimization=False.*automatic optimization only", _Manual())


@pytest.mark.feature(
    "Callbacks",
    "`BackboneFinetuning`, `BaseFinetuning`",
    "refused: train the head in one fit, then unfreeze and start a second one from its weights",
)
@pytest.mark.feature("Callbacks", "`BatchSizeFinder`", "refused")
@pytest.mark.feature("Callbacks", "`ThroughputMonitor`", "refused: `DCPCallback` reports throughput")
@pytest.mark.feature("Callbacks", "`LearningRateFinder`", "refused: look for the rate on one device")
@pytest.mark.feature("Callbacks", "`GradientAccumulationScheduler`", "refused: the planner chooses")
@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (lambda: BatchSizeFinder(), "BatchSizeFinder"),
        (lambda: ThroughputMonitor(batch_size_fn=len), "ThroughputMonitor"),
        (lambda: LearningRateFinder(), "LearningRateFinder"),
        (lambda: GradientAccumulationScheduler({0: 1, 4: 2}), "GradientAccumulationScheduler"),
        (lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=2), "BaseFinetuning"),
    ],
)
def test_callbacks(callback: Callable[[], pl.Callback], name: str) -> None:
    _refused(f"callback {name} cannot be used with DCPStrategy: .*Remove the callback", callbacks=[callback()])


@pytest.mark.feature("Trainer", '`gradient_clip_algorithm="value"`', "refused: clip by norm")
def test_clipping_by_value() -> None:
    """huggingface/transformers#9168."""
    _refused(
        "gradient_clip_algorithm='value'.*allowed is 'norm'",
        gradient_clip_val=0.1,
        gradient_clip_algorithm="value",
    )


@pytest.mark.feature("Trainer", '`precision="16-mixed"`, `"16-true"`', "refused")
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_precisions(precision: str) -> None:
    _refused(f"precision='{precision}'.*allowed are", precision=precision)


@pytest.mark.feature("Trainer", '`precision="64-true"`', "refused")
def test_double_precision_is_refused_by_lightning() -> None:
    with pytest.raises(ValueError, match="64-true"):
        make_trainer(DCPStrategy(), CASE, devices=1, precision="64-true")
    assert "64-true" not in SUPPORTED_PRECISIONS


@pytest.mark.feature("Trainer", "ZeRO stages 2 and 3, `overlap_comm`", "refused")
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"zero_optimization": {"stage": 3}}, "only stage 1"),
        ({"zero_optimization": {"overlap_comm": True}}, "only False"),
    ],
)
def test_deepspeed_settings(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineConfigError, match=sentence):
        DCPStrategy(deepspeed_config=config)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recompute": "some"}, "recompute is 'some'; allowed are"),
        ({"loss_weighting": "word"}, "loss_weighting is 'word'; allowed are"),
        ({"loss_reduction": "max"}, "loss_reduction is 'max'; allowed are"),
        ({"self_check": "maybe"}, "self_check is 'maybe'; allowed are"),
        ({"memory_limit": 1.5}, "memory_limit is 1.5; allowed are"),
        ({"memory_limit": "80 bananas"}, "memory_limit is '80 bananas'; allowed is"),
        ({"memory_limit": "0GB"}, "memory_limit is '0GB'; allowed is"),
        ({"max_batch_size": 0}, "max_batch_size is 0; allowed are"),
        ({"max_tokens": -3}, "max_tokens is -3; allowed are"),
        ({"min_micro_batches": True}, "min_micro_batches is True; allowed are"),
        ({"max_step_factor": 0.5}, "max_step_factor is 0.5; allowed are finite numbers from 1"),
        ({"max_step_factor": math.inf}, "max_step_factor is inf; allowed are finite numbers from 1"),
        ({"max_step_factor": "2"}, "max_step_factor is '2'; allowed are"),
        ({"sp_sizes": 2}, "sp_sizes is 2; allowed are a list"),
        ({"layers": "Block"}, "layers is 'Block'; allowed are a list"),
        ({"sp_sizes": [0, 2]}, r"sp_sizes is \[0, 2\]; allowed are"),
        ({"sp_sizes": []}, r"sp_sizes is \[\]; allowed are"),
        ({"memory_limit": None}, "memory_limit is None; allowed are"),
        ({"memory_limit": [1]}, r"memory_limit is \[1\]; allowed are"),
        ({"profile": 5}, "profile is 5; allowed are"),
        ({"profile": ""}, "profile is ''; allowed are"),
        ({"deepspeed_config": [1]}, r"deepspeed_config is \[1\]; allowed are"),
    ],
)
def test_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DCPStrategy(**arguments)


@pytest.mark.parametrize("name", ["groups", "profile", "plan", "last_step", "consumed_samples", "consumed_tokens"])
def test_nothing_to_ask_before_setup(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"DCPStrategy.{name} exists only after setup"):
        getattr(DCPStrategy(), name)


def test_a_config_file(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text('{"wall_clock_breakdown": true}')
    assert DCPStrategy(deepspeed_config=good)._user_config == {"wall_clock_breakdown": True}
    with pytest.raises(FileNotFoundError, match="is no file"):
        DCPStrategy(deepspeed_config=tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        DCPStrategy(deepspeed_config=tmp_path / "list.json")


@pytest.mark.feature("Trainer", '`strategy="dcp"`')
def test_by_name() -> None:
    """jentic/jentic-one#958: registered twice, it is there once."""
    trainer = pl.Trainer(strategy="dcp", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, DCPStrategy)
    DCPStrategy.register_strategies(StrategyRegistry)  # a second time: nothing happens
    assert StrategyRegistry.available_strategies().count("dcp") == 1


@pytest.mark.feature("Trainer", "`pytorch_lightning`", "refused: use `lightning`")
@pytest.mark.launch
def test_the_other_package_is_refused() -> None:
    """``pytorch_lightning`` is a separate class tree; its Trainer must not take our strategy half-way."""
    code = (
        "import pytorch_lightning as pl\n"
        "from lightning_dcp import DCPStrategy\n"
        "pl.Trainer(strategy=DCPStrategy(), accelerator='cpu', devices=1, logger=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "instance of `pytorch_lightning.strategies.Strategy`" in done.stderr


@pytest.mark.parametrize("device", ["cpu"])
def test_devices_are_numbered(device: str) -> None:
    strategy = DCPStrategy(parallel_devices=[torch.device(device)] * 3)
    assert [d.index for d in strategy.parallel_devices or []] == [0, 1, 2]
