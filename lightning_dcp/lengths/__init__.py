"""Lengths of samples: the paper's distributions, readers of files, groups of similar lengths."""

from lightning_dcp.lengths.distributions import DISTRIBUTIONS, distribution, training_flops
from lightning_dcp.lengths.groups import MAX_GROUPS, Lengths, length_groups, representatives

__all__ = [
    "DISTRIBUTIONS",
    "MAX_GROUPS",
    "Lengths",
    "distribution",
    "length_groups",
    "representatives",
    "training_flops",
]
