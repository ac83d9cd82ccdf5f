"""Samples that fit no setting: found before the first step, refused or left out of every epoch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.data.planning import PlanningContext, request_of
from lightning_dcp.planners.assembly import common_sp_sizes, raise_infeasible, settings_within
from lightning_dcp.planners.protocol import InfeasibleError
from lightning_dcp.planners.static import Static

TooLong = Literal["raise", "leave_out"]
LEFT_OUT_FILE = "left_out_samples.json"


def check_too_long(too_long: str) -> None:
    """Refuse what is no :data:`TooLong`.

    Raises:
        ValueError: names it.
    """
    if too_long not in get_args(TooLong):
        raise ValueError(f'too_long is {too_long!r}; allowed are "raise" and "leave_out"')


def misfits(context: PlanningContext, shapes: IntArray) -> IntArray:
    """Samples that fit no setting even alone: at no allowed p, with as many layers recomputed as are allowed.

    Args:
        context: planner, cost model, groups and limits; equal on all ranks, and so is the answer.
        shapes: size of each sample of the dataset, ``[n, axes]``.

    Returns:
        Their positions in the dataset, ascending.
    """
    # Rows are compared far more slowly than numbers.
    rows, axis = (shapes.reshape(-1), None) if shapes.shape[1] == 1 else (shapes, 0)
    sizes, which = np.unique(rows, axis=axis, return_inverse=True)
    sizes = sizes.reshape(len(sizes), -1)
    request = request_of(context, np.arange(len(sizes)), sizes)
    fits = np.zeros(len(sizes), dtype=bool)
    for p in _sp_sizes(context):
        fits |= settings_within(request, p, np.asarray(1), sizes).nanoseconds < INFEASIBLE
    return np.flatnonzero(~fits[which.reshape(-1)])


def refuse(context: PlanningContext, shapes: IntArray, samples: IntArray) -> None:
    """Say which samples fit no setting, why, and what can be done.

    Raises:
        InfeasibleError: always; the same on every rank.
    """
    longest = samples[np.argsort(-shapes[samples].prod(axis=1), kind="stable")]
    tokens = shapes.prod(axis=1)
    names = ", ".join(f"sample {i} of {tokens[i]} tokens" for i in longest[:3].tolist())
    try:
        raise_infeasible(request_of(context, longest[:1], shapes), 0, _sp_sizes(context))
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{len(samples)} of {len(shapes)} samples fit no setting; the longest are {names}. {error} "
            '(DCPDataModule(too_long="leave_out") does, and lists them in a file)'
        ) from None


def write_left_out(folder: str | Path, shapes: IntArray, samples: IntArray) -> Path | None:
    """List samples that are left out, with their sizes, in a file that appears whole or not at all; by rank 0.

    A file that an earlier run left is replaced. Where it cannot be written, a warning says why.

    Args:
        folder: where to.
        shapes: size of each sample of the dataset, ``[n, axes]``.
        samples: positions in the dataset.
    """
    rows = [{"index": i, "size": shapes[i].tolist()} for i in samples.tolist()]
    path = Path(folder) / LEFT_OUT_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=LEFT_OUT_FILE, dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"samples_of_dataset": len(shapes), "left_out": rows}, file)
        os.replace(name, path)
    except OSError as error:
        rank_zero_warn(f"the {len(rows)} samples that are left out could not be listed in {path}: {error}")
        return None
    return path


def _sp_sizes(context: PlanningContext) -> Sequence[int]:
    """Sizes that a sample may use."""
    sizes = common_sp_sizes(context.world, context.cost)
    if isinstance(context.planner, Static) and context.planner.sp_size in sizes:
        return (context.planner.sp_size,)
    return sizes
