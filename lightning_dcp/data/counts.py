"""How many samples of an epoch are trained, left and left out, by the state of the sampler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCounts:
    """Counts of one epoch; a sample that the order has twice counts twice.

    Attributes:
        epoch: its number.
        planned: samples that the order of the epoch has, without those that are left out.
        trained: of these, trained, each once.
        left: of these, not trained: the epoch is not over, was stopped or limited, or ``drop_last`` dropped them.
        left_out: samples that fit no setting and are not in the epoch.
    """

    epoch: int
    planned: int
    trained: int
    left: int
    left_out: int
