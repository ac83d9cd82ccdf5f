"""The saved position of a run in its data: what it holds, and what of another run it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.data.checks import check_integer

STATE_VERSION = 1

SIZES = ("global_batch_size", "global_batch_tokens", "batches_per_step")
"""What fixes the content of steps; all are ``None`` where a planner drew it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands in its data; plain numbers, the same on every rank.

    It depends on neither the number of ranks nor the planner nor the profile.

    Attributes:
        epoch: epoch of the permutation.
        position: places of its order that all were consumed.
        beyond: places after ``position`` that were consumed too, ascending.
        step: steps of the epoch that were consumed.
        drawn: whether a planner drew one of them, so that they are no slices of the order.
        consumed_samples: samples trained on since the first epoch.
        consumed_tokens: their tokens, without padding.
    """

    epoch: int
    position: int
    beyond: Sequence[int]
    step: int
    drawn: bool
    consumed_samples: int
    consumed_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "beyond": [int(place) for place in self.beyond],
            "step": self.step,
            "drawn": self.drawn,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """Read :meth:`to_dict` back; states from before planners could draw lack ``step`` and ``drawn``.

        Raises:
            ValueError: a field is of the wrong type or negative.
        """
        names = ("epoch", "position", "step", "consumed_samples", "consumed_tokens")
        numbers = {name: check_integer(name, {"step": 0, **state}.get(name), minimum=0) for name in names}
        beyond, drawn = state.get("beyond"), state.get("drawn", False)
        if not isinstance(beyond, list) or not isinstance(drawn, bool):
            raise ValueError(f"beyond is {beyond!r:.50} and drawn is {drawn!r}; they must be a list and a bool")
        places = [check_integer("beyond", place, minimum=0) for place in beyond]
        return cls(**numbers, beyond=places, drawn=drawn)


def check_same(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a state whose fields are not those of this run.

    Raises:
        ValueError: the sentence names the field and both values.
    """
    for name, ours in expected.items():
        if name not in state or state[name] != ours:
            raise ValueError(
                f"the saved position has {name} = {state.get(name)!r}, this run has {ours!r}; samples could "
                "be lost or repeated. Resume with the value of the saved run, or start without its state"
            )


def changed_steps(state: Mapping[str, Any], sizes: Mapping[str, int | None]) -> str | None:
    """How the steps to come are made otherwise than those of the saved run, where either was drawn by a planner.

    Args:
        state: the saved state.
        sizes: what fixes the steps of this run; nothing where a planner draws them.
    """
    saved = {name: state.get(name) for name in SIZES}
    if saved == dict(sizes):
        return None
    then, now = (
        next(
            (f"fixed by {name} = {value}" for name, value in given.items() if value is not None),
            "drawn by the planner",
        )
        for given in (saved, sizes)
    )
    return (
        f"The steps of the saved run were {then}, those of this run are {now}: the rest of the epoch is trained, each "
        "sample once, but in other steps than the saved run would have made"
    )


def left_out_of(state: Mapping[str, Any], size: int) -> IntArray:
    """Samples that the saved run left out, ascending; states from before samples could be left out have none.

    Args:
        state: the saved state.
        size: samples of the dataset.

    Raises:
        ValueError: they are no samples of the dataset.
    """
    saved = state.get("left_out", [])
    if not isinstance(saved, list):
        raise ValueError(f"left_out is {saved!r:.50}; it must be a list of samples")
    samples = np.asarray([check_integer("left_out", sample, minimum=0) for sample in saved], dtype=np.int64)
    if samples.max(initial=0) >= size:
        raise ValueError(f"left_out names sample {samples.max()}; the dataset has {size} samples")
    return samples
