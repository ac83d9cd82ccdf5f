"""Lengths of samples: the paper's distributions, readers of files, groups of similar lengths."""

from lightning_dcp.lengths.collecting import LengthsError
from lightning_dcp.lengths.distributions import DISTRIBUTIONS, distribution, training_flops
from lightning_dcp.lengths.groups import MAX_GROUPS, Lengths, length_groups, representatives
from lightning_dcp.lengths.readers import read_lengths

__all__ = [
    "DISTRIBUTIONS",
    "MAX_GROUPS",
    "Lengths",
    "LengthsError",
    "distribution",
    "length_groups",
    "read_lengths",
    "representatives",
    "training_flops",
]
