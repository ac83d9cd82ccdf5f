"""The single-file checkpoint over ZeRO-1: whole weights and optimizer state by name, resumed on any number of ranks."""

from lightning_dcp.checkpoint.files import AtomicCheckpointIO
from lightning_dcp.checkpoint.hooks import CheckpointedStrategy
from lightning_dcp.checkpoint.meeting import LonelyCallError
from lightning_dcp.checkpoint.section import Section, plan_settings

__all__ = ["AtomicCheckpointIO", "CheckpointedStrategy", "LonelyCallError", "Section", "plan_settings"]
