"""What ``lightning-dcp simulate`` does with its arguments."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from lightning_dcp.cli.entries import Bench, Entry, check_specs
from lightning_dcp.cli.money import price_and_deadline
from lightning_dcp.cli.sources import Data, read_data, warn_of_extrapolation
from lightning_dcp.cli.tables import cluster_line, results_table
from lightning_dcp.plan import IterationPlan
from lightning_dcp.simulate import Simulation, plan_record, with_ratios
from lightning_dcp.wording import percent, table


def answer(arguments: Namespace) -> int:
    """Simulate and print.

    Raises:
        ValueError: something in the input is wrong.
        OSError: a file cannot be read or written.
        ImportError: a picture is asked for and matplotlib is not installed.
    """
    check_specs(arguments.planner)
    if arguments.plot:
        from lightning_dcp.simulate import pictures

        pictures.check_path(arguments.plot)
    if arguments.plans:
        _check_plans(_plan_paths(arguments.plans, [spec.label for spec in arguments.planner]).values(), arguments)
    batch_size = arguments.global_batch_size
    data = read_data(arguments, arguments.lengths, arguments.steps * batch_size)
    bench = Bench(arguments, data, arguments.steps)
    # All planners and clusters before the first simulation: a wrong one must not cost the time of the others.
    for world_size in arguments.weak_scaling or ():
        bench.cluster(world_size)
    entries = [bench.entry(spec, arguments.world_size, batch_size) for spec in arguments.planner]
    warn_of_extrapolation(data, bench.cluster(arguments.world_size))
    results, plans = _simulate(bench, entries, arguments.plans)
    scaling = _weak_scaling(bench)
    extra, text = price_and_deadline(bench, results)
    if arguments.plot:
        pictures.draw(results, plans, scaling, Path(arguments.plot))
    if arguments.json:
        for result, more in zip(results, extra, strict=True):
            more.update({"weak_scaling": scaling[result.planner]} if scaling else {})
        objects = [result.as_json() | more for result, more in zip(results, extra, strict=True)]
        print(json.dumps(objects, indent=1, allow_nan=False))
    else:
        print("\n\n".join([_head(data, bench), results_table(results), *_scaling_text(scaling), *text]))
    return 0


def _simulate(
    bench: Bench, entries: Sequence[Entry], plans_file: str | None
) -> tuple[list[Simulation], dict[str, IterationPlan]]:
    """The results, and the first plan of each planner."""
    paths = _plan_paths(plans_file, [entry.label for entry in entries]) if plans_file else {}
    results: list[Simulation] = []
    firsts: dict[str, IterationPlan] = {}
    for entry in entries:
        with ExitStack() as stack:
            file = stack.enter_context(paths[entry.label].open("w", encoding="utf-8")) if paths else None

            def on_step(
                step: int, plan: IterationPlan, label: str = entry.label, file: TextIO | None = file
            ) -> None:
                firsts.setdefault(label, plan)
                if file is not None:
                    record = plan_record(step, plan, len(bench.data.shapes))
                    file.write(json.dumps(record, separators=(",", ":")) + "\n")

            results.append(bench.run(entry, bench.arguments.global_batch_size, on_step))
    return with_ratios(results, [entry.planner.name for entry in entries]), firsts


def _check_plans(paths: Iterable[Path], arguments: Namespace) -> None:
    """Refuse files of plans that cannot be written, or that would replace what is read.

    Raises:
        ValueError: says which.
    """
    read = [Path(name) for name in (arguments.lengths, arguments.profile) if Path(name).is_file()]
    for path in paths:
        if not path.parent.is_dir() or path.is_dir():
            why = "it is a folder" if path.is_dir() else "its folder does not exist"
            raise ValueError(f"{path} cannot be written: {why}")
        if path.exists() and any(path.samefile(other) for other in read):
            raise ValueError(f"{path} is read and cannot take the plans; give them a name of their own")


def _plan_paths(file: str, labels: Sequence[str]) -> dict[str, Path]:
    """One file for each planner; with several the label stands before the suffix."""
    path = Path(file)
    if len(labels) == 1:
        return {labels[0]: path}
    safe = {label: re.sub(r"[^\w.+-]+", "-", label) for label in labels}
    if len({*safe.values()}) < len(labels):
        raise ValueError(f"planners {labels} would write their plans to the same file; simulate them one by one")
    return {label: path.with_name(f"{path.stem}.{name}{path.suffix}") for label, name in safe.items()}


def _weak_scaling(bench: Bench) -> dict[str, list[tuple[int, float]]]:
    """For each planner ranks and tokens per second of each world that was asked for."""
    found: dict[str, list[tuple[int, float]]] = {}
    for world_size in sorted(bench.arguments.weak_scaling or ()):
        batch_size = bench.batch_size(world_size)
        for spec in bench.arguments.planner:
            result = bench.run(bench.entry(spec, world_size, batch_size), batch_size)
            found.setdefault(spec.label, []).append((world_size, result.tokens_per_second))
    return found


def _scaling_text(scaling: dict[str, list[tuple[int, float]]]) -> Iterator[str]:
    if not scaling:
        return
    worlds = [world_size for world_size, _ in next(iter(scaling.values()))]
    rows = [["tokens/s per GPU", *(f"{w:,} GPUs" for w in worlds)]]
    for label, points in scaling.items():
        each = [speed / world_size for world_size, speed in points]
        rows.append([label, *(f"{speed:,.0f} ({percent(speed / each[0])})" for speed in each)])
    yield table(rows)


def _head(data: Data, bench: Bench) -> str:
    arguments: Any = bench.arguments
    count, tokens = len(data.shapes), int(data.shapes.prod(axis=1).sum())
    total = arguments.steps * arguments.global_batch_size
    return "\n".join(
        (
            f"{data.name}: {count:,} samples, {tokens:,} tokens",
            cluster_line(bench.cluster(arguments.world_size), arguments.profile),
            f"each planner trains the same {total:,} samples: {arguments.steps} x {arguments.global_batch_size} of the "
            f"permutation of seed {arguments.seed}",
        )
    )
