"""What the plugin itself costs: DCPStrategy held at p = 1, g = 1, r = 0 against Lightning's own DeepSpeed strategy.

python -m benchmarks.overhead [--pairs 20] [--steps 6] [--batch-size 24] [--quick]

Two CPU processes train the same batches with the same model, optimizer and clipping under both strategies, in turns
(A B A B, ...) within the same processes. The ratio of the times is taken within each pair, so what else the machine
does falls on both. Lightning's strategy refuses CPU devices; only that refusal is lifted from it, nothing of ours runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RANKS = 2
BATCH_SIZE = 24
"""Samples of a rank in each step: about 0.4 s on one core."""


def main(arguments: list[str] | None = None) -> None:
    """Run all pairs, print the ratio with its interval, write JSON and a picture."""
    options = _parser().parse_args(arguments)
    if options.worker:
        run_worker(options.pairs, options.steps, options.batch_size, Path(options.out))
        return
    pairs, steps = (2, 2) if options.quick else (options.pairs, options.steps)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {RANKS} processes on CPU",
        "python": platform.python_version(),
        "steps_per_fit": steps,
        "batch_size": options.batch_size,
        **summary(_run(pairs, steps, options.batch_size)),
    }
    print(sentence(result))
    if not options.quick and options.batch_size == BATCH_SIZE:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result, RESULTS / "overhead.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="fits under each of the two strategies")
    parser.add_argument("--steps", type=int, default=6, help="steps of each fit that are timed")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        help="samples of a rank in each step; only the default is kept",
    )
    parser.add_argument("--quick", action="store_true", help="two pairs of two steps, nothing is written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser


def _run(pairs: int, steps: int, batch_size: int) -> list[dict[str, float]]:
    """Seconds per step and the last loss of each fit, pair by pair."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["-m", "benchmarks.overhead", "--worker", "--out", str(out)]
        command += ["--pairs", str(pairs), "--steps", str(steps), "--batch-size", str(batch_size)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
        if done.returncode:
            raise SystemExit(f"the measurement failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        found: list[dict[str, float]] = json.loads(out.read_text())
        return found


def run_worker(pairs: int, steps: int, batch_size: int, out: Path) -> None:
    """One process of all pairs; the first one writes what it measured.

    Args:
        pairs: fits under each strategy.
        steps: steps of each that are timed.
        batch_size: samples of a rank in each step.
        out: file for the result.
    """
    from benchmarks.overhead_worker import measure

    with tempfile.TemporaryDirectory() as folder:
        found = measure(pairs, steps, batch_size, folder)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def summary(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Median ratio with its 95 % interval (order statistics), and the seconds of a step.

    Raises:
        SystemExit: the two strategies did not train the same.
    """
    wrong = [pair for pair in pairs if abs(pair["dcp_loss"] - pair["plain_loss"]) > 1e-3 * pair["plain_loss"]]
    if wrong:
        raise SystemExit(f"the losses differ, so the two did not train the same batches: {wrong}")
    ratios = sorted(pair["dcp"] / pair["plain"] for pair in pairs)
    low = max(int(stats.binom.ppf(0.025, len(ratios), 0.5)) - 1, 0)
    return {
        "ratio": float(np.median(ratios)),
        "interval": [ratios[low], ratios[len(ratios) - 1 - low]],
        "seconds_per_step": {name: float(np.median([pair[name] for pair in pairs])) for name in ("dcp", "plain")},
        "pairs": pairs,
    }


def sentence(result: dict[str, Any]) -> str:
    """The result for the eye."""
    seconds = result["seconds_per_step"]
    low, high = result["interval"]
    return (
        f"{len(result['pairs'])} pairs of {result['steps_per_fit']} steps: {1e3 * seconds['dcp']:.0f} ms a step under "
        f"DCPStrategy, {1e3 * seconds['plain']:.0f} ms under plain DeepSpeed; median ratio {result['ratio']:.3f} "
        f"(95 % interval {low:.3f} to {high:.3f})"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """The ratio of each pair, in the order of measurement, with median and interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    ratios = [pair["dcp"] / pair["plain"] for pair in result["pairs"]]
    axes.axhspan(*result["interval"], color="#4477aa", alpha=0.2, label="95 % interval of the median")
    axes.axhline(result["ratio"], color="#4477aa", label=f"median {result['ratio']:.3f}")
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.plot(range(1, len(ratios) + 1), ratios, "o", color="#222222")
    axes.set_xlabel("pair")
    axes.set_ylabel("time of a step, DCPStrategy / plain")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
