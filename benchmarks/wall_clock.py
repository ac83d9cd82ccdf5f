"""For real: the main example's data and model on two CPU processes, the same samples for every planner.

python -m benchmarks.wall_clock [--samples 256] [--repeats 5] [--quick]

Every planner trains one epoch of the same samples, from the same weights, with the same profile. The planners take
turns (A B C, A B C, ...), so that what else the machine does falls on all of them; ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_dcp.amounts import parse_bytes
from lightning_dcp.cost import CostModel
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Limits, PlanRequest, Static, create
from lightning_dcp.profile import Profile
from lightning_dcp.topology import World

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "padded"
PLANNERS = (BASELINE, "bucket", "dcp-inter", "dcp-intra", "balanced")
GLOBAL_BATCH_SIZE = 32
MEMORY_LIMIT = "64MB"
"""Long samples must be divided over both processes or recomputed. The example's 48 MB leave one process no room for its
longest samples even when all layers are recomputed, so plain data parallelism could not run at all."""
BATCH_SIZES = (1, 2, 4, 8, 16)
"""Batch sizes that padded data parallelism may use; it gets the one of least predicted time."""


def main(arguments: list[str] | None = None) -> None:
    """Run all planners in turns, print a table, write JSON and a picture."""
    options = _parser().parse_args(arguments)
    if options.worker:
        run_worker(options.worker, options.samples, options.batch_size, Path(options.profile), Path(options.out))
        return
    samples, repeats = (64, 2) if options.quick else (options.samples, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        turns, batch_size = _all_turns(Path(folder), samples, repeats)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, 2 processes on CPU",
        "python": platform.python_version(),
        "samples": samples,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "memory_limit": MEMORY_LIMIT,
        "padded_batch_size": batch_size,
        "planners": {name: summary(name, turns) for name in PLANNERS},
        "turns": turns,
    }
    print(table(result))
    if not options.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "wall_clock.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result, RESULTS / "wall_clock.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wall_clock", description=__doc__)
    parser.add_argument("--samples", type=int, default=256, help="samples that every planner trains, once")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--quick", action="store_true", help="two turns of 64 samples, nothing is written")
    parser.add_argument("--worker", choices=PLANNERS, help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser


def _all_turns(folder: Path, samples: int, repeats: int) -> tuple[list[dict[str, dict[str, float]]], int]:
    # The first run measures the profile and warms the caches of the machine; it does not count.
    _run("balanced", samples, 1, folder)
    batch_size = best_batch_size(folder)
    turns = []
    with tqdm(total=repeats * len(PLANNERS), unit="run") as bar:
        for turn in range(repeats):
            order = PLANNERS[turn % len(PLANNERS) :] + PLANNERS[: turn % len(PLANNERS)]
            found = {}
            for name in order:
                bar.set_description(name)
                found[name] = _run(name, samples, batch_size, folder)
                bar.update()
            turns.append(found)
    return turns, batch_size


def best_batch_size(folder: Path) -> int:
    """Batch size with which padded data parallelism is predicted to be fastest on the very same steps."""
    cost = CostModel(Profile.from_json((folder / "profile.json").read_text()))
    plans = [IterationPlan.from_json(line) for line in (folder / "plans.jsonl").read_text().splitlines()]

    def seconds(batch_size: int) -> int:
        planner = Static(sp_size=1, batch_size=batch_size, deal="in_order")
        return sum(planner.plan(_request(plan, cost)).makespan for plan in plans)

    return min(BATCH_SIZES, key=seconds)


def _request(plan: IterationPlan, cost: CostModel) -> PlanRequest:
    """The samples of a step in the order of their ids, which is no order of lengths."""
    shapes = {i: shape for m in plan.micro_batches for i, shape in zip(m.sample_ids, m.shapes, strict=True)}
    return PlanRequest(
        sample_ids=sorted(shapes),
        shapes=[shapes[i] for i in sorted(shapes)],
        cost=cost,
        world=World.build(plan.world_size, cost.sp_sizes),
        limits=Limits(memory_bytes=parse_bytes(MEMORY_LIMIT)),
    )


def _run(name: str, samples: int, batch_size: int, folder: Path) -> dict[str, float]:
    """Train one epoch in fresh processes."""
    out = folder / "out.json"
    command = [sys.executable, "-m", "benchmarks.wall_clock", "--worker", name, "--samples", str(samples)]
    command += ["--batch-size", str(batch_size)]
    command += ["--profile", str(folder / "profile.json"), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(out.read_text())
    out.unlink()
    return result


def run_worker(name: str, samples: int, batch_size: int, profile: Path, out: Path) -> None:
    """One process of one run; the first one writes the result.

    Args:
        name: one of :data:`PLANNERS`.
        samples: how many samples the epoch has.
        batch_size: that of padded data parallelism.
        profile: file that the profile is kept in.
        out: file for the result.
    """
    sys.path.insert(0, str(ROOT / "examples" / "stdlib"))
    import lightning as L
    import torch
    from data import Samples, StandardLibrary
    from model import ByteModel

    from lightning_dcp import DCPCallback, DCPStrategy

    class Part(StandardLibrary):
        """A seeded part of the training samples."""

        def setup(self, stage: str) -> None:
            """Choose the samples."""
            super().setup(stage)
            kept = self.train_dataset.samples
            chosen = np.random.default_rng(0).permutation(len(kept))[:samples]
            self.train_dataset = Samples([kept[i] for i in sorted(chosen.tolist())])

    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    planner = Static(sp_size=1, batch_size=batch_size, deal="in_order") if name == BASELINE else create(name)
    callback = DCPCallback(plans_file=out.with_name("plans.jsonl"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        strategy=DCPStrategy(planner=planner, memory_limit=MEMORY_LIMIT, profile=profile, self_check=False),
    )
    trainer.fit(ByteModel(), datamodule=Part(global_batch_size=GLOBAL_BATCH_SIZE))
    if trainer.is_global_zero:
        out.write_text(json.dumps(measured(callback)))


def measured(callback: Any) -> dict[str, float]:
    """Totals of a run from the records of its steps."""
    tokens = [record.plan.num_tokens for record in callback.records]
    seconds = [row["seconds"] for row in callback.metrics]
    weights = np.asarray(seconds) / sum(seconds)
    computed = sum(m.padded_tokens for record in callback.records for m in record.plan.micro_batches)
    return {
        "steps": len(tokens),
        "samples": sum(record.plan.num_samples for record in callback.records),
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "idle_measured": float(weights @ [record.idle_ratio for record in callback.records]),
        "idle_planned": float(weights @ [record.plan.idle_ratio for record in callback.records]),
        "padding": 1.0 - sum(tokens) / computed,
    }


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Speed with its interval, the ratio to padded data parallelism within each turn, and means of the rest."""
    mine = [turn[name] for turn in turns]
    return {
        "tokens_per_second": interval([run["tokens_per_second"] for run in mine]),
        "ratio_to_padded": interval(
            [turn[name]["tokens_per_second"] / turn[BASELINE]["tokens_per_second"] for turn in turns]
        ),
        **{
            key: float(np.mean([run[key] for run in mine]))
            for key in ("steps", "samples", "idle_measured", "idle_planned", "padding")
        },
    }


def table(result: dict[str, Any]) -> str:
    """The result for the eye."""
    lines = [
        f"{result['samples']} samples of the standard library, {len(result['turns'])} turns",
        f"{'planner':<10} {'tokens/s (95 %)':>24} {'ratio to padded (95 %)':>26} {'idle planned':>13} "
        f"{'measured':>9} {'padding':>8} {'steps':>6}",
    ]
    for name, row in result["planners"].items():
        speed, low, high = row["tokens_per_second"]
        ratio, least, most = row["ratio_to_padded"]
        lines.append(
            f"{name:<10} {f'{speed:,.0f} ({low:,.0f} to {high:,.0f})':>24} "
            f"{f'{ratio:.2f} ({least:.2f} to {most:.2f})':>26} {row['idle_planned']:>13.1%} "
            f"{row['idle_measured']:>9.1%} {row['padding']:>8.1%} {row['steps']:>6.0f}"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of speed with their intervals, and of idle time planned and measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed_axes, idle_axes = figure.subplots(1, 2)
    names, rows = list(result["planners"]), list(result["planners"].values())
    speeds = np.asarray([row["tokens_per_second"] for row in rows])
    errors = np.abs(speeds[:, 1:] - speeds[:, :1]).T
    speed_axes.bar(names, speeds[:, 0], yerr=errors, color="#4477aa", capsize=4)
    speed_axes.set_ylabel("tokens per second, 95 % interval")
    places = np.arange(len(names))
    for shift, key, colour in ((-0.2, "planned", "#bbbbbb"), (0.2, "measured", "#ee6677")):
        heights = [100 * row[f"idle_{key}"] for row in rows]
        idle_axes.bar(places + shift, heights, 0.4, label=key, color=colour)
    idle_axes.set_xticks(places, names)
    idle_axes.set_ylabel("idle, % of all processes' time")
    idle_axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
