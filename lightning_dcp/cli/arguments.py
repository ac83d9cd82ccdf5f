"""Arguments that several commands share. Only the standard library: ``--help`` must be quick."""

from __future__ import annotations

from argparse import ArgumentParser

from lightning_dcp.cli.parsing import positive_float, positive_int, positive_ints, seed

BUILT_IN_LENGTHS = ("short", "balanced", "long", "panda")
DEFAULT_PROFILE = "h200-transformer-1d"
LENGTHS = (
    "file with one length per sample (text, .csv, .npy, .npz, .jsonl or .parquet), or one of the built-in "
    f"distributions: {', '.join(BUILT_IN_LENGTHS)}"
)


def add_cluster(parser: ArgumentParser) -> None:
    """The cluster, its profile and the limits of a plan."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--world-size", type=positive_int, required=True, metavar="W", help="number of GPUs (ranks)"
    )
    group.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="FILE|NAME",
        help="profile of the model: a file that DCPStrategy(profile=...) wrote, or a built-in name: "
        "h200-transformer-1d, h200-transformer-2d (default: %(default)s)",
    )
    group.add_argument(
        "--memory-limit", default="80GB", metavar="AMOUNT", help="memory that a GPU may use (default: %(default)s)"
    )
    group.add_argument(
        "--ranks-per-node", type=positive_int, default=8, metavar="R", help="GPUs of a node (default: %(default)s)"
    )
    group.add_argument(
        "--sp-sizes",
        type=positive_ints,
        metavar="P,P,...",
        help="sequence-parallel sizes (default: those of the profile up to W that divide one another)",
    )


def add_limits(parser: ArgumentParser) -> None:
    """What a plan must respect, as the arguments of ``DCPStrategy`` with the same names."""
    group = parser.add_argument_group("limits of a plan")
    group.add_argument("--packing", action="store_true", help="micro-batches may hold mixed lengths in one row")
    group.add_argument("--max-batch-size", type=positive_int, metavar="B", help="most samples of a micro-batch")
    group.add_argument(
        "--max-tokens", type=positive_int, metavar="T", help="most tokens of a micro-batch per GPU, with padding"
    )
    group.add_argument(
        "--min-micro-batches", type=positive_int, default=1, metavar="G", help="G_min (default: %(default)s)"
    )
    group.add_argument("--max-step-factor", type=positive_float, metavar="F", help="G_max")
    group.add_argument(
        "--recompute",
        choices=("auto", "none", "full"),
        default="auto",
        help="recomputed layers (default: %(default)s)",
    )


def add_data(parser: ArgumentParser) -> None:
    """How the lengths are read and cut into steps."""
    group = parser.add_argument_group("data")
    group.add_argument("--column", metavar="NAME", help="column of a table of lengths")
    group.add_argument(
        "--global-batch-size",
        type=positive_int,
        required=True,
        metavar="N",
        help="samples of an optimizer step, over all GPUs",
    )
    group.add_argument(
        "--seed", type=seed, default=0, help="seed of the order and of built-in lengths (default: %(default)s)"
    )
