"""Plugins and callbacks around checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


def put_below(plugin: CheckpointIO, writer: Callable[[], CheckpointIO]) -> None:
    """Let a plugin that wraps another (``AsyncCheckpointIO``) write with ours; where a user gave it one, that stays."""
    if isinstance(plugin, _WrappingCheckpointIO) and type(plugin.checkpoint_io) in (type(None), TorchCheckpointIO):
        plugin.checkpoint_io = writer()


def begin_average(callback: StochasticWeightAveraging, module: pl.LightningModule) -> None:
    """What the callback's ``setup`` does, behind its refusal of every DeepSpeed strategy."""
    callback._average_model = copy.deepcopy(module)
