"""What the virtual cluster says in absolute numbers: what fits, how fast, and how long a step's end takes.

``python -m benchmarks.virtual`` writes the numbers of ``docs/virtual.md`` and prints its tables. No planner runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.cost import CostModel, RecomputePolicy
from lightning_dcp.virtual import MEMORY_BYTES, PROFILES, profile

RESULTS = Path(__file__).parent / "results"
WORLD_SIZE = 32
LENGTHS = (512, 2048, 8192, 32_768, 65_536, 131_072, 262_144)
WORLDS = (8, 32, 128, 1024)

_LONGEST, _LARGEST_BATCH = 2**23, 4096
_WORDS = {"full": "all layers recomputed", "none": "none recomputed"}


def longest(cost: CostModel, sp_size: int, policy: RecomputePolicy) -> int:
    """Tokens of the longest sample that fits alone."""
    low, high = 0, _LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        found = cost.settings(sp_size, np.asarray(1), np.asarray(middle), MEMORY_BYTES, policy)
        low, high = (middle, high) if found.bytes <= MEMORY_BYTES else (low, middle)
    return low


def best(cost: CostModel, tokens: int) -> dict[str, Any]:
    """The batch size, ``p`` and ``r`` of most tokens per second and GPU for samples of one length."""
    batches = np.asarray(cost.batch_sizes(_LARGEST_BATCH))
    rows = []
    for p in cost.sp_sizes:
        found = cost.settings(p, batches, np.asarray(tokens), MEMORY_BYTES)
        rate = np.where(
            found.bytes <= MEMORY_BYTES, 1e9 * batches * tokens / (p * found.nanoseconds.astype(float)), 0
        )
        k = int(rate.argmax())
        setting = {"sp_size": p, "batch_size": int(batches[k]), "recompute": found.recompute[k].tolist()}
        seconds = float(found.nanoseconds[k]) / 1e9
        rows.append({**setting, "seconds": seconds, "tokens_per_second_and_gpu": float(rate[k])})
    return {"tokens": tokens, **max(rows, key=lambda row: row["tokens_per_second_and_gpu"])}


def measure(name: str) -> dict[str, Any]:
    """All numbers of one model."""
    cost = CostModel(profile(name, WORLD_SIZE))
    policies: tuple[RecomputePolicy, ...] = ("full", "none")
    return {
        "world_size": WORLD_SIZE,
        "static_bytes": cost.profile.static_bytes,
        "longest": {policy: {p: longest(cost, p, policy) for p in cost.sp_sizes} for policy in policies},
        "best": [best(cost, tokens) for tokens in LENGTHS],
        "sync_seconds": {w: profile(name, w).sync_time / 1e9 for w in WORLDS},
    }


def tables(name: str, found: dict[str, Any]) -> str:
    """Markdown."""
    sizes = list(found["longest"]["full"])
    lines = [
        f"**`{name}`**\n",
        f"| longest sample | {' | '.join(f'p = {p}' for p in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
        *(
            f"| {_WORDS[policy]} | {' | '.join(f'{n:,}' for n in row.values())} |"
            for policy, row in found["longest"].items()
        ),
        "\n| tokens | p | b | recomputed | seconds | tokens/s per GPU |\n|---|---|---|---|---|---|",
    ]
    for row in found["best"]:
        counts = " + ".join(map(str, row["recompute"]))
        lines.append(
            f"| {row['tokens']:,} | {row['sp_size']} | {row['batch_size']} | {counts} | {row['seconds']:.3f} "
            f"| {row['tokens_per_second_and_gpu']:,.0f} |"
        )
    sync = ", ".join(f"{1000 * s:.0f} ms on {w:,}" for w, s in found["sync_seconds"].items())
    return "\n".join([*lines, f"\nEnd of a step: {sync} GPUs.\n"])


def main() -> None:
    """Write the numbers and print the tables."""
    parser = argparse.ArgumentParser(description="Absolute numbers of the virtual H200 cluster.")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: measure(name) for name in PROFILES}
    (folder / "virtual.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(tables(name, row) for name, row in found.items()))


if __name__ == "__main__":
    main()
