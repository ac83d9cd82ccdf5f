"""From words of the command line to lengths, clusters and planners."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lightning_dcp import lengths, virtual
from lightning_dcp.amounts import parse_bytes
from lightning_dcp.cli.arguments import BUILT_IN_LENGTHS
from lightning_dcp.cli.places import place_of
from lightning_dcp.cost import IntArray
from lightning_dcp.planners import InfeasibleError, Limits
from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.simulate import Cluster, check_lengths

DISTRIBUTION_SAMPLES = 100_000
"""Samples of a built-in distribution, unless the simulation needs more."""
MOST_DISTRIBUTION_SAMPLES = 10_000_000
"""Most of them; a longer simulation trains further epochs."""

LIMITS = tuple(field.name for field in fields(Limits) if field.name != "memory_bytes")
"""Limits of plans that a call may set by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """Sizes of samples and where they come from.

    Attributes:
        name: as the user gave it.
        shapes: int64 ``[n, axes]``.
        is_file: whether :attr:`name` is a file.
        column: the column that was read.
    """

    name: str
    shapes: IntArray
    is_file: bool
    column: str | None = None

    def place(self, position: int) -> str:
        """Where a sample's length stands, for messages."""
        where = place_of(Path(self.name), position, self.column) if self.is_file else f"sample {position}"
        return f"{self.name}, {where}"

    def located(self, error: InfeasibleError) -> ValueError:
        """The same error with the place of the sample that it names."""
        found = re.match(r"sample (\d+)\b", str(error))
        place = self.place(int(found[1]) % len(self.shapes)) if found and self.is_file else self.name
        return ValueError(f"{place}: {error}")


def read_data(arguments: Namespace, source: str, samples: int) -> Data:
    """The lengths of a file or of a built-in distribution, as shapes for the profile.

    Args:
        arguments: those of the command.
        source: file or name.
        samples: least number of samples of a distribution.

    Raises:
        ValueError: the file holds no lengths; the message names the line.
        OSError: it cannot be read.
    """
    is_file = source not in BUILT_IN_LENGTHS
    if is_file:
        found = lengths.read_lengths(source, column=arguments.column, progress=True)
    elif arguments.column is not None:
        raise ValueError(f"--column is given, and {source} is no file but a built-in distribution")
    else:
        count = min(max(samples, DISTRIBUTION_SAMPLES), MOST_DISTRIBUTION_SAMPLES)
        found = lengths.distribution(source, count, arguments.seed)
    if arguments.profile in virtual.PROFILES:
        found = virtual.shapes(arguments.profile, found)
    shapes = found[:, None] if found.ndim == 1 else found
    return Data(name=source, shapes=np.asarray(shapes, dtype=np.int64), is_file=is_file, column=arguments.column)


def read_profile(source: str, world_size: int) -> Profile:
    """A built-in profile for so many ranks, or one from a file.

    Raises:
        ValueError: neither a built-in name nor a file with a profile.
    """
    if source in virtual.PROFILES:
        return virtual.profile(source, world_size)
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"profile {source!r} is neither a file nor a built-in name; the names are {', '.join(virtual.PROFILES)}"
        )
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (ProfileError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {error}") from error


def build_cluster(arguments: Namespace, world_size: int) -> Cluster:
    """The cluster of the arguments, with so many ranks."""
    limits = {name: getattr(arguments, name) for name in LIMITS if hasattr(arguments, name)}
    return Cluster.build(
        read_profile(arguments.profile, world_size),
        world_size,
        memory_bytes=parse_bytes(arguments.memory_limit),
        sp_sizes=arguments.sp_sizes,
        ranks_per_node=arguments.ranks_per_node,
        **limits,
    )


def warn_of_extrapolation(data: Data, cluster: Cluster) -> None:
    """Say on standard error that samples are longer than the profile's probes: their times are a straight line."""
    longest = cluster.cost.profile.max_tokens
    if longer := int((data.shapes.prod(axis=1) > longest).sum()):
        print(
            f"note: {longer:,} of {len(data.shapes):,} samples are longer than the {longest:,} tokens that the profile "
            "ends at; beyond them time grows as a straight line, so attention comes out too cheap and the useful "
            "share too high",
            file=sys.stderr,
        )


def checked_cluster(arguments: Namespace, data: Data, world_size: int) -> Cluster:
    """:func:`build_cluster`, on which every sample fits somewhere.

    Raises:
        ValueError: a sample does not; the message names its place and length. Or the samples have other axes than
            those that the profile was measured with.
    """
    cluster = build_cluster(arguments, world_size)
    axes, given = len(cluster.cost.profile.measurements[0].shape), data.shapes.shape[1]
    if axes != given:
        raise ValueError(
            f"{data.name} has samples of {given} axes, and profile {arguments.profile} was measured with "
            f"{axes}; give one size for each axis (--column frames,patches), or a profile of that model"
        )
    try:
        check_lengths(data.shapes, cluster)
    except InfeasibleError as error:
        raise data.located(error) from error
    return cluster
