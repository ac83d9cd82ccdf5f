"""Planners of the command line, each with the cluster that it is to run on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_dcp import planners
from lightning_dcp.cli.parsing import PlannerSpec
from lightning_dcp.cli.sources import LIMITS, Data, checked_cluster
from lightning_dcp.planners import InfeasibleError, Planner
from lightning_dcp.simulate import Cluster, Simulation, for_dataset, simulate, tuned_static
from lightning_dcp.simulate.run import OnStep

PLAIN = "plain"
"""Data parallel with padding at its best fixed setting, which is looked for before it runs."""

_ALWAYS: dict[str, dict[str, Any]] = {"packed": {"packing": True}, "static": {"packing": False}}
"""Limits without which a planner refuses to plan, so that those who pack and those who pad can be compared."""

_FLAGS, _COUNTS = ("packing", "exact_shapes"), ("max_batch_size", "max_tokens", "min_micro_batches")
_RECOMPUTE = ("auto", "none", "full")


class Entry(NamedTuple):
    """A planner, its name in the results, and its cluster with the limits that hold for it."""

    label: str
    planner: Planner
    cluster: Cluster


class Bench:
    """What all simulations of one call have in common.

    Args:
        arguments: those of the command.
        data: the lengths.
        steps: ``K``.
    """

    def __init__(self, arguments: Namespace, data: Data, steps: int) -> None:
        self.arguments, self.data, self.steps = arguments, data, steps
        self._clusters: dict[int, Cluster] = {}

    def cluster(self, world_size: int) -> Cluster:
        """The cluster with so many ranks; every sample fits it.

        Raises:
            ValueError: one does not.
        """
        if world_size not in self._clusters:
            self._clusters[world_size] = checked_cluster(self.arguments, self.data, world_size)
        return self._clusters[world_size]

    def batch_size(self, world_size: int) -> int:
        """``N`` in proportion to the ranks."""
        asked, at = int(self.arguments.global_batch_size), int(self.arguments.world_size)
        return max(round(asked * world_size / at), 1)

    def entry(self, spec: PlannerSpec, world_size: int, batch_size: int) -> Entry:
        """The planner of a specification on so many ranks.

        Raises:
            ValueError: no such planner or option, or a value that is not allowed.
        """
        cluster = self.cluster(world_size)
        if spec.name == PLAIN:
            return Entry(spec.label, self._plain(spec, cluster, batch_size), _padding(cluster))
        options = {name: value for name, value in spec.options.items() if name not in LIMITS}
        if spec.name == "floating":
            options = {"min_samples": max(batch_size // 2, 1), "max_samples": 2 * batch_size} | options
        planner, limits = planners.create(spec.name, **options), _limits_of(spec)
        # A planner's own option of that name comes first: bucket's policy holds where the limits leave the choice.
        own = {name: value for name, value in limits.items() if hasattr(planner, name)}
        if own:
            planner = planners.create(spec.name, **options, **own)
        others = _ALWAYS.get(spec.name, {}) | {name: v for name, v in limits.items() if name not in own}
        return Entry(
            spec.label,
            for_dataset(planner, self.data.shapes),
            replace(cluster, limits=replace(cluster.limits, **others)),
        )

    def _plain(self, spec: PlannerSpec, cluster: Cluster, batch_size: int) -> Planner:
        if spec.options:
            raise ValueError(
                f"planner {PLAIN!r} finds its own setting; it takes no option, not {sorted(spec.options)}"
            )
        return tuned_static(
            self.data.shapes, cluster, global_batch_size=batch_size, seed=self.arguments.seed, progress=True
        )

    def run(self, entry: Entry, batch_size: int, on_step: OnStep | None = None) -> Simulation:
        """Simulate one planner.

        Raises:
            ValueError: a sample fits no setting of it; the message names the sample's place.
        """
        try:
            found = simulate(
                self.data.shapes,
                entry.cluster,
                entry.planner,
                steps=self.steps,
                global_batch_size=batch_size,
                seed=self.arguments.seed,
                on_step=on_step,
                progress=True,
            )
        except InfeasibleError as error:
            raise self.data.located(error) from error
        return replace(found, planner=entry.label)


def check_specs(specs: Sequence[PlannerSpec]) -> None:
    """Refuse unknown names and labels that stand twice, before anything is simulated.

    Raises:
        ValueError: says which.
    """
    allowed = (*planners.PLANNERS, PLAIN)
    for spec in specs:
        if spec.name not in allowed:
            raise ValueError(f"planner {spec.name!r} is unknown; allowed are {', '.join(allowed)}")
        if [s.label for s in specs].count(spec.label) > 1:
            raise ValueError(f"planner {spec.label} is given twice; each may be given once")


def _padding(cluster: Cluster) -> Cluster:
    return replace(cluster, limits=replace(cluster.limits, packing=False))


def _limits_of(spec: PlannerSpec) -> dict[str, Any]:
    """Limits among the options.

    Raises:
        ValueError: a value is of another kind.
    """
    limits = {name: value for name, value in spec.options.items() if name in LIMITS}
    for name, value in limits.items():
        kind, allowed = _kind(name)
        if not allowed(value):
            raise ValueError(f"planner {spec.label}: {name} is {value!r}; it must be {kind}")
    return limits


def _kind(name: str) -> tuple[str, Callable[[Any], bool]]:
    if name in _FLAGS:
        return "true or false", lambda value: isinstance(value, bool)
    if name in _COUNTS:
        return "an integer of at least 1", lambda value: type(value) is int and value >= 1
    if name == "recompute":
        return "one of auto, none, full", lambda value: value in _RECOMPUTE
    return "a number above 0", lambda value: type(value) in (int, float) and value > 0
