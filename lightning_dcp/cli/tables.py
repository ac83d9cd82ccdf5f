"""What simulations say on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lightning_dcp.simulate import Cluster, LongestSample, Simulation
from lightning_dcp.wording import counted, gigabytes, percent, table


def results_table(results: Sequence[Simulation]) -> str:
    """One line per planner with all that was counted."""
    head = (
        *("planner", "tokens/s", "x bucket", "s/step", "steps", "idle", "padding", "useful", "gap"),
        *("plan ms", "worst", "dropped", "repeated"),
    )
    rows = [head]
    for r in results:
        rows.append(
            (
                r.planner,
                f"{r.tokens_per_second:,.0f}",
                "-" if r.ratio_to_bucket is None else f"{r.ratio_to_bucket:.3f}",
                f"{r.seconds_per_step:.3f}",
                f"{r.optimizer_steps:,}",
                percent(r.idle_ratio),
                percent(r.padding_ratio),
                percent(r.useful_ratio),
                "-" if r.gap is None else percent(r.gap),
                f"{r.planning_ms:.1f}",
                f"{r.planning_ms_worst:.1f}",
                f"{r.samples_dropped:,}",
                f"{r.samples_repeated:,}",
            )
        )
    return table(rows)


def cluster_line(cluster: Cluster, profile: str) -> str:
    """The cluster in a few words."""
    world, limits = cluster.world, cluster.limits
    nodes = -(-world.world_size // world.ranks_per_node)
    sizes = [p for p in world.sp_sizes if p in cluster.cost.sp_sizes]
    return (
        f"{counted(world.world_size, 'GPU')} in {counted(nodes, 'node')}, {gigabytes(limits.memory_bytes)} each, "
        f"p = {', '.join(map(str, sizes))}; profile {profile}, "
        f"{cluster.cost.profile.sync_time / 1e6:,.1f} ms at the end of a step"
    )


def longest_lines(longest: LongestSample, place: str, cluster: Cluster) -> str:
    """The longest sample against the memory."""
    limit, per_node = cluster.limits.memory_bytes, cluster.world.ranks_per_node
    fit = longest.narrowest
    assert fit is not None
    layers = sum(fit.recompute)
    depth = f", {layers} of {sum(cluster.cost.num_layers)} layers recomputed" if layers else ", nothing recomputed"
    nodes = f"{-(-fit.sp_size // per_node)} nodes" if fit.sp_size > per_node else "within a node"
    text = (
        f"{prod(longest.shape):,} tokens ({place}): fits from p = {fit.sp_size} on ({nodes}), "
        f"with {gigabytes(fit.bytes)} of {gigabytes(limit)}{depth}"
    )
    if below := [f for f in longest.fits if f.sp_size < fit.sp_size]:
        text += f"; at p = {below[-1].sp_size} it would need {gigabytes(below[-1].bytes)} at least"
    return text


def hours_text(hours: float) -> str:
    """Hours with two digits behind the point, and with three that count where it is less than one."""
    return f"{hours:,.2f}" if hours >= 1.0 else f"{hours:.3g}"
