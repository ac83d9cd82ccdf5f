"""``--price`` and ``--deadline``: hours, money, and the fewest GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_dcp.cli.entries import Bench
from lightning_dcp.cli.tables import hours_text, longest_lines
from lightning_dcp.simulate import Deadline, Simulation, hours_needed, longest_sample, own_work, smallest_world
from lightning_dcp.wording import counted, labelled, table


def price_and_deadline(bench: Bench, results: Sequence[Simulation]) -> tuple[list[dict[str, Any]], list[str]]:
    """What JSON objects get in addition, one mapping per planner, and paragraphs of text.

    Only where ``--price`` or ``--deadline`` ask for it.
    """
    arguments, shapes = bench.arguments, bench.data.shapes
    extra: list[dict[str, Any]] = [{} for _ in results]
    if arguments.price is None and arguments.deadline is None:
        return extra, []
    samples = arguments.samples or len(shapes)
    passes = samples / len(shapes)
    hours = [hours_needed(result, _work(bench, arguments.world_size, passes)) for result in results]
    for more, time in zip(extra, hours, strict=True):
        more["hours"] = time
        if arguments.price is not None:
            more["cost"] = time * arguments.world_size * arguments.price
    what = f"{samples:,} samples ({passes * int(shapes.prod(axis=1).sum()):,.0f} tokens)"
    text = [_hours_table(results, hours, bench, what)]
    if arguments.deadline is not None:
        best = min(range(len(results)), key=lambda k: hours[k])
        deadline = _search(bench, best, hours[best], passes)
        extra[best]["smallest_world_size"] = deadline.world_size
        text.append(_deadline_text(bench, results[best].planner, deadline))
    longest = longest_sample(shapes, bench.cluster(arguments.world_size))
    place = bench.data.place(longest.position)
    text.append(labelled("longest sample", longest_lines(longest, place, bench.cluster(arguments.world_size))))
    return extra, text


def _work(bench: Bench, world_size: int, passes: float) -> float:
    """Own work of so many passes over the data, by the profile for so many ranks."""
    return passes * float(own_work(bench.cluster(world_size).cost, bench.data.shapes).sum(dtype=np.float64))


def _hours_table(results: Sequence[Simulation], hours: Sequence[float], bench: Bench, what: str) -> str:
    world_size, price = bench.arguments.world_size, bench.arguments.price
    rows = [["planner", "hours", "GPU hours"]]
    rows += [[r.planner, hours_text(h), f"{h * world_size:,.1f}"] for r, h in zip(results, hours, strict=True)]
    if price is not None:
        rows[0].append(f"cost at {price:g} per GPU hour")
        for row, time in zip(rows[1:], hours, strict=True):
            row.append(f"{time * world_size * price:,.2f}")
    return f"{what} on {counted(world_size, 'GPU')}:\n{table(rows)}"


def _search(bench: Bench, best: int, known: float, passes: float) -> Deadline:
    """The smallest world that meets the deadline with one planner; the number of samples of a step stays."""
    arguments = bench.arguments
    spec, batch_size = arguments.planner[best], arguments.global_batch_size

    def hours_at(world_size: int) -> float:
        if world_size == arguments.world_size:
            return known
        try:
            result = bench.run(bench.entry(spec, world_size, batch_size), batch_size)
            return hours_needed(result, _work(bench, world_size, passes))
        except ValueError:
            # So few ranks that the longest sample or the planner's setting does not fit.
            return float("inf")

    return smallest_world(hours_at, arguments.deadline, arguments.ranks_per_node)


def _deadline_text(bench: Bench, planner: str, deadline: Deadline) -> str:
    arguments = bench.arguments
    if deadline.world_size is None:
        fastest = min(deadline.tried, key=lambda pair: pair[1])
        return (
            f"no number of GPUs meets {arguments.deadline:g} h with {planner} and {arguments.global_batch_size} "
            f"samples a step: {counted(fastest[0], 'GPU')} need {hours_text(fastest[1])} h and more gain nothing; "
            "use larger steps"
        )
    nodes = -(-deadline.world_size // arguments.ranks_per_node)
    text = (
        f"fewest GPUs for {arguments.deadline:g} h: {deadline.world_size:,} ({counted(nodes, 'node')}) with {planner}, "
        f"{hours_text(deadline.hours)} h"
    )
    if arguments.price is not None:
        text += f", cost {deadline.hours * deadline.world_size * arguments.price:,.2f}"
    tried = ", ".join(
        f"{w}: {hours_text(h)} h" if h < float("inf") else f"{w}: does not fit" for w, h in deadline.tried
    )
    return f"{text}\ntried: {tried}"
