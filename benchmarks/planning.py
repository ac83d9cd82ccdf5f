"""How far the plans of ``balanced`` are from the lower bound, and how long planning takes on one core.

python -m benchmarks.planning [--quick] [--out FOLDER]

The cost model is that of :mod:`benchmarks.reference`, the steps are fixed, lengths lognormal. With packing the gap is
that to the bound of packed rows; without it, that to the padding-aware bound, beside the reference heuristics of
:mod:`benchmarks.heuristics` on the same steps. A sweep over the number of ranks and samples shows how both grow.

Times are processor time of this process, since the machine may be shared; beside the milliseconds stands how many
times a fixed sort of a million integers they take, for comparison with other machines. About 5 minutes; ``--quick``
takes half a minute and writes below ``runs/``.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.heuristics import HEURISTICS
from benchmarks.planning_picture import draw
from benchmarks.reference import lognormal_lengths, reference_profile, reference_request
from lightning_dcp.cost import CostModel
from lightning_dcp.planners import PlanRequest, create
from lightning_dcp.planners.bound import padded_lower_bound

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("runs") / "planning"

SIZES = ((8, 64), (16, 128), (32, 512), (64, 512), (256, 2_048), (1_024, 8_192))
"""Ranks and samples of the steps with a goal."""
SWEEP = tuple(product((8, 32, 128, 512, 1_024), (64, 256, 1_024, 4_096, 8_192)))
DATA = tuple(product((1_340, 245), (1.0, 1.8)))
"""Median and sigma of the lengths."""
SEEDS, SWEEP_SEEDS = 20, 3
LARGE, LARGE_SEEDS = 512, 5
"""Samples beyond which the tighter bound and the heuristics take seconds, and the steps that are enough then."""

GOAL_MS = {(64, 512): 30.0, (1_024, 8_192): 300.0}
"""Most milliseconds of planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Steps of one kind.

    Attributes:
        world_size: ranks.
        samples: of each step.
        median: of the lengths, tokens.
        sigma: of their logarithms.
        packing: whether rows hold mixed lengths.
        seeds: number of steps.
        compared: whether the tighter bound and the heuristics are computed too, without packing.
    """

    world_size: int
    samples: int
    median: int
    sigma: float
    packing: bool
    seeds: int
    compared: bool

    def goal(self) -> tuple[float, float] | None:
        """Most gap on average and at worst, of packed steps."""
        if not (self.packing and self.compared):
            return None
        if self.median == 245:
            return 0.04, float("inf")
        return (0.01, 0.03) if self.samples <= 512 else (0.02, float("inf"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, print a table, write JSON and a picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few steps of few sizes, for a look")
    parser.add_argument(
        "--out", type=Path, help=f"folder of the results; default {RESULTS}, quick {QUICK_RESULTS}"
    )
    options = parser.parse_args(arguments)
    folder = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    result = run(cases(options.quick))
    print(table(result))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planning.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, folder / "planning.png")
    print(f"written: {folder / 'planning.json'} and planning.png")


def cases(quick: bool) -> list[Case]:
    """All kinds of steps, those with a goal first."""
    sizes, seeds = (SIZES[:4], 3) if quick else (SIZES, SEEDS)
    sweep, sweep_seeds = (SWEEP[::6], 1) if quick else (SWEEP, SWEEP_SEEDS)
    found = []
    for compared, chosen, count in ((True, sizes, seeds), (False, sweep, sweep_seeds)):
        for packing, (median, sigma), (world_size, samples) in product((True, False), DATA, chosen):
            slow = compared and not packing and samples > LARGE
            found.append(
                Case(
                    world_size=world_size,
                    samples=samples,
                    median=median,
                    sigma=sigma,
                    packing=packing,
                    seeds=min(count, LARGE_SEEDS) if slow else count,
                    compared=compared,
                )
            )
    return found


def run(chosen: Sequence[Case]) -> dict[str, Any]:
    """Measure these cases; the values are those of the JSON file."""
    cost = CostModel(reference_profile())
    sort_ms = sorting_milliseconds()
    measured = []
    with tqdm(total=sum(case.seeds for case in chosen), unit="step") as bar:
        for case in chosen:
            bar.set_description(f"W={case.world_size} n={case.samples} {'packed' if case.packing else 'padded'}")
            measured.append(measure(case, cost, sort_ms, bar.update))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sort_ms": sort_ms,
        "goal_ms": [{"world_size": w, "samples": n, "ms": ms} for (w, n), ms in GOAL_MS.items()],
        "cases": measured,
    }


def machine() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one core of {names[0] if names else platform.processor() or platform.machine()}"


def sorting_milliseconds() -> float:
    """Median processor time of sorting a million fixed integers."""
    values = np.random.default_rng(0).integers(0, 2**62, 1_000_000)
    return float(np.median([timed(partial(np.sort, values))[1] for _ in range(9)]))


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result and the milliseconds of processor time that it took."""
    start = time.process_time()
    result = call()
    return result, 1e3 * (time.process_time() - start)


def measure(case: Case, cost: CostModel, sort_ms: float, advance: Callable[[], object]) -> dict[str, Any]:
    """Gaps and times over the seeds of one case."""
    planner, steps = create("balanced"), []
    for seed in range(case.seeds):
        lengths = lognormal_lengths(case.samples, case.median, case.sigma, seed, case.world_size)
        request = reference_request(case.world_size, lengths, packing=case.packing, cost=cost)
        plan, milliseconds = timed(partial(planner.plan, request))
        step = {"gap": plan.gap, "ms": milliseconds}
        if case.compared and not case.packing:
            step |= compared(request, plan.makespan)
        steps.append(step)
        advance()
    return {**asdict(case), **summary(case, steps, sort_ms)}


def compared(request: PlanRequest, makespan: int) -> dict[str, float]:
    """How far plan and heuristics are from the padding-aware bound; only ``balanced`` without a name."""
    bound = padded_lower_bound(request)
    found = {"bound_gap": makespan / bound - 1}
    return found | {name: heuristic(request) / bound - 1 for name, heuristic in HEURISTICS.items()}


def summary(case: Case, steps: list[dict[str, float]], sort_ms: float) -> dict[str, Any]:
    """Means and worst values; for heuristics also by how much the best of them is longer than the plan."""
    columns = {name: np.asarray([step[name] for step in steps]) for name in steps[0]}
    found: dict[str, Any] = {
        "gap": float(columns["gap"].mean()),
        "gap_worst": float(columns["gap"].max()),
        "ms": float(np.median(columns["ms"])),
        "ms_worst": float(columns["ms"].max()),
        "sorts": float(np.median(columns["ms"])) / sort_ms,
    }
    if "bound_gap" in columns:
        best = np.min([columns[name] for name in HEURISTICS], axis=0)
        ahead = (1 + best) / (1 + columns["bound_gap"]) - 1
        found |= {
            "bound_gap": float(columns["bound_gap"].mean()),
            "bound_gap_worst": float(columns["bound_gap"].max()),
            "heuristics": {name: float(columns[name].mean()) for name in HEURISTICS},
            "ahead": float(ahead.mean()),
            "ahead_least": float(ahead.min()),
            # At the bound itself nobody can be ahead.
            "behind": int(((ahead < 0) | ((ahead == 0) & (columns["bound_gap"] > 0))).sum()),
        }
    return found | {"missed": missed(case, found)}


def missed(case: Case, found: dict[str, Any]) -> list[str]:
    """Goals that these steps did not reach."""
    reasons, goal = [], case.goal()
    if goal is not None and (found["gap"] > goal[0] or found["gap_worst"] > goal[1]):
        reasons.append("gap")
    if case.compared and found["ms"] > GOAL_MS.get((case.world_size, case.samples), float("inf")):
        reasons.append("time")
    if found.get("behind"):
        reasons.append("heuristics")
    return reasons


def table(result: dict[str, Any]) -> str:
    """One line for each case."""
    lines = [
        f"{result['machine']}, {result['date']}, sort of a million integers {result['sort_ms']:.1f} ms",
        "mode    median sigma     W     n   gap   worst      ms   worst   sorts  against the padding-aware bound",
    ]
    for case in result["cases"]:
        line = (
            f"{'packed' if case['packing'] else 'padded'}  {case['median']:>6} {case['sigma']:>5} "
            f"{case['world_size']:>5} {case['samples']:>5} {case['gap']:>5.2%} {case['gap_worst']:>7.2%} "
            f"{case['ms']:>7.1f} {case['ms_worst']:>7.1f} {case['sorts']:>7.2f}"
        )
        if "heuristics" in case:
            others = ", ".join(f"{name} {gap:.1%}" for name, gap in case["heuristics"].items())
            line += f"  balanced {case['bound_gap']:.2%} (worst {case['bound_gap_worst']:.2%}), {others}"
        lines.append(line + "".join(f"  MISSED: {reason}" for reason in case["missed"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
