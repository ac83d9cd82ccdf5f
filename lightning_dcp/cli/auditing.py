"""What ``lightning-dcp audit`` prints."""

from __future__ import annotations

import shlex
from argparse import Namespace

from lightning_dcp.audit import Audit, audit
from lightning_dcp.cli.arguments import DEFAULT_PROFILE
from lightning_dcp.cli.sources import Data, checked_cluster, read_data, warn_of_extrapolation
from lightning_dcp.cli.tables import cluster_line, longest_lines
from lightning_dcp.planners import InfeasibleError
from lightning_dcp.simulate import Cluster
from lightning_dcp.wording import counted, labelled, percent, table


def answer(arguments: Namespace) -> int:
    """Audit and print.

    Raises:
        ValueError: something in the input is wrong.
        OSError: the file cannot be read.
    """
    data = read_data(arguments, arguments.lengths, arguments.steps * arguments.global_batch_size)
    cluster = checked_cluster(arguments, data, arguments.world_size)
    warn_of_extrapolation(data, cluster)
    try:
        found = audit(
            data.shapes,
            cluster,
            global_batch_size=arguments.global_batch_size,
            steps=arguments.steps,
            seed=arguments.seed,
            progress=True,
        )
    except InfeasibleError as error:
        raise data.located(error) from error
    print(screen(found, data, cluster, arguments))
    return 0


def screen(found: Audit, data: Data, cluster: Cluster, arguments: Namespace) -> str:
    """The whole text."""
    longest = longest_lines(found.longest, data.place(found.longest.position), cluster)
    parts = (
        f"{data.name}: {found.samples:,} samples, {found.tokens:,} tokens\n"
        f"{cluster_line(cluster, arguments.profile)}",
        _quantiles(found),
        labelled(
            "longest 1 %",
            f"{counted(found.longest_count, 'sample')}, {percent(found.longest_tokens)} of the tokens, "
            f"{percent(found.longest_pairs)} of the attention pairs, {percent(found.longest_work)} of the GPU time",
        )
        + "\n"
        + labelled("longest sample", longest),
        _planners(found),
        f"next: {next_command(arguments)}",
    )
    return "\n\n".join(parts)


def next_command(arguments: Namespace) -> str:
    """The simulation that shows more, as a line to be typed."""
    words = ["lightning-dcp", "simulate", "--lengths", arguments.lengths]
    for name, default in (
        ("column", None),
        ("profile", DEFAULT_PROFILE),
        ("memory_limit", "80GB"),
        ("ranks_per_node", 8),
        ("seed", 0),
    ):
        value = getattr(arguments, name)
        if value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.sp_sizes:
        words += ["--sp-sizes", ",".join(map(str, arguments.sp_sizes))]
    words += ["--world-size", str(arguments.world_size), "--global-batch-size", str(arguments.global_batch_size)]
    words += [word for name in ("plain", "bucket", "dcp-intra", "balanced") for word in ("--planner", name)]
    return shlex.join([*words, "--plot", "gain.png"])


def _quantiles(found: Audit) -> str:
    rows = [["samples up to", *(f"{100 * q.share:g} %" for q in found.quantiles)]]
    rows.append(["tokens", *(f"{q.tokens:,}" for q in found.quantiles)])
    rows.append(["GPU ms of one", *(f"{q.milliseconds:,.1f}" for q in found.quantiles)])
    rows.append(["of all GPU time", *(percent(q.work_share) for q in found.quantiles)])
    return table(rows)


def _planners(found: Audit) -> str:
    rows = [["useful share of the paid time", "", "idle", "padding", "tokens/s"]]
    for r in found.planners:
        cells = (percent(r.useful_ratio), percent(r.idle_ratio), percent(r.padding_ratio))
        rows.append([r.planner, *cells, f"{r.tokens_per_second:,.0f}"])
    for n, r in found.steps.items():
        cells = (percent(r.useful_ratio), percent(r.idle_ratio), percent(r.padding_ratio))
        rows.append([f"balanced, {n:,} samples a step", *cells, f"{r.tokens_per_second:,.0f}"])
    return table(rows)
