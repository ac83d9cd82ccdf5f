"""The DeepSpeed side: configuration, and the gradient reduction that we trigger once per step.

Every private name of DeepSpeed that training touches stands in this file; ``tests/test_upstream.py`` checks that each
still exists; those of a checkpoint stand in ``checkpoint/shards.py``. ZeRO-1 averages gradients over the ranks when
told that a backward is the last of a step. Ranks with different numbers of micro-batches have no common last
backward, so every backward runs with the boundary off, and the reduction is called by hand after all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.memory import DEFAULT_BUCKET

Config = dict[str, Any]


class EngineConfigError(ValueError):
    """A DeepSpeed setting that would break the equality with a single process, or hang."""


def build_config(user: Config | None, *, num_parameters: int, half: bool) -> Config:
    """DeepSpeed configuration of a run: ours, overlaid with the user's.

    Args:
        user: the user's configuration; not changed.
        num_parameters: trainable parameters of the model; the reduce bucket is allocated whole, so it need not
            be larger than that.
        half: whether the weights are bf16; gradients are then accumulated and communicated in float32, since bf16
            accumulation loses 0.7 % at 64 micro-batches.

    Raises:
        EngineConfigError: another ZeRO stage than 1, ``overlap_comm``, offloading or a fixed accumulation is asked for.
    """
    check_config(user or {})
    bucket = max(2, min(DEFAULT_BUCKET, num_parameters))
    config: Config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU optimizer would have to be compiled, and replaces the user's.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket + bucket % 2,
        },
    }
    if half:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return _overlay(config, copy.deepcopy(user or {}))


def check_config(user: Config) -> None:
    """Refuse settings of the user's configuration that plans of different lengths cannot live with.

    Raises:
        EngineConfigError: with what was got, what is allowed and why.
    """
    zero = user.get("zero_optimization", {})
    if zero.get("stage", 1) != 1:
        raise EngineConfigError(
            f"ZeRO stage {zero['stage']} was asked for; only stage 1 is supported: the others reduce inside every "
            "backward and hang when ranks have different numbers of micro-batches. Remove `stage` from deepspeed_config"
        )
    if zero.get("overlap_comm"):
        raise EngineConfigError(
            "overlap_comm=True was asked for; only False is supported: it sums wrong buckets when a parameter has no "
            "gradient on some rank. Remove `overlap_comm` from deepspeed_config"
        )
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name):
            raise EngineConfigError(f"{name} was asked for; it is not supported. Remove it from deepspeed_config")
    if "gradient_accumulation_steps" in user or "train_batch_size" in user:
        raise EngineConfigError(
            "gradient_accumulation_steps and train_batch_size cannot be fixed: the planner chooses the number of "
            "micro-batches of each step. Remove them from deepspeed_config and set DCPDataModule(global_batch_size=...)"
        )


def _overlay(base: Config, top: Config) -> Config:
    for key, value in top.items():
        base[key] = (
            _overlay(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        )
    return base


def skip_cpu_operator() -> None:
    """Keep DeepSpeed from compiling its shared-memory operator for CPU runs; call before ``init_distributed``.

    It serves ``inference_all_reduce`` only. Compiling it takes half a minute and a compiler, and a process that is
    killed while it is compiled or loaded leaves a lock file that every later run waits for, without an end.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def read_config(config: Config | str | Path | None) -> Config:
    """The user's settings from a dict or a JSON file; empty for ``None``.

    Raises:
        FileNotFoundError: the path names no file.
        ValueError: the file holds something else than a JSON object.
    """
    if config is None or isinstance(config, dict):
        return dict(config or {})
    if not isinstance(config, str | Path):
        raise ValueError(f"deepspeed_config is {config!r}; allowed are a dict and the name of a JSON file")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"deepspeed_config names {path}, which is no file; give a dict or a JSON file")
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; a DeepSpeed configuration is an object")
    return content


class ZeroEngine:
    """A DeepSpeed engine of stage 1 whose gradients are reduced once per step, when we say so.

    Works with both optimizers that DeepSpeed may choose: ``DeepSpeedZeroOptimizer`` (float32) and
    ``BF16_Optimizer`` (bf16 weights with float32 accumulation).

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module: nn.Module = self.engine.module
        return module

    @property
    def _optimizer(self) -> Any:
        return self.engine.optimizer

    @property
    def _keeps_float32(self) -> bool:
        """Whether the optimizer keeps its own float32 gradients beside the parameters' (``BF16_Optimizer``)."""
        return hasattr(self._optimizer, "fp32_groups_gradients")

    def begin(self) -> None:
        """Start a step: no backward reduces anything."""
        self.engine.set_gradient_accumulation_boundary(False)

    def abandon(self) -> None:
        """Drop a step's gradients, so that an error leaves nothing behind."""
        self._optimizer.zero_grad()

    def scale_gradients(self, factor: float) -> None:
        """Multiply what this rank has accumulated; used when the counts of a step turn out other than expected."""
        gradients = list(self._accumulated())
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def last_gradients_finite(self) -> bool:
        """Whether the gradients that the last backward left on the parameters are finite (synchronises)."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return all(bool(torch.isfinite(g).all()) for g in gradients)

    def reduce(self) -> None:
        """Average the gradients over all ranks: the step's one reduction, called by every rank once.

        A parameter without a gradient on this rank (an unused head, an empty rank) contributes zeros: ZeRO-1 sums
        the wrong buckets, without an error, if ranks reduce different sets of parameters.
        """
        self._fill_missing()
        self.engine.set_gradient_accumulation_boundary(True)
        if hasattr(self._optimizer, "setup_buckets"):
            self._optimizer.setup_buckets()
        self.engine.allreduce_gradients()

    def _groups(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = (
            self._optimizer.bf16_groups if self._keeps_float32 else self._optimizer.bit16_groups
        )
        return groups

    def _accumulated(self) -> Iterator[Tensor]:
        if self._keeps_float32:
            for group in self._optimizer.fp32_groups_gradients:
                yield from group
            return
        for group in self._groups():
            for parameter in group:
                gradient = self._optimizer.get_param_gradient_attribute(parameter)
                if gradient is not None:
                    yield gradient

    def _fill_missing(self) -> None:
        if self._keeps_float32:
            # The float32 buffers exist for all parameters and are zero where no backward wrote; only the marks that
            # exclude them from the gradient norm have to be equal on all ranks.
            for index, group in enumerate(self._groups()):
                self._optimizer.fp32_groups_has_gradients[index] = [True] * len(group)
            return
        for group in self._groups():
            for parameter in group:
                if self._optimizer.get_param_gradient_attribute(parameter) is None:
                    parameter.grad = torch.zeros_like(parameter)
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer.fill_grad_accum_attribute()
