"""Telling errors apart."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.memory import is_oom_error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or in the main memory."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and bool(is_oom_error(error)))
