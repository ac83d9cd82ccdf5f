"""What the documentation says of the cost of a save is what the kept measurements say."""

from __future__ import annotations

import json

import pytest

from benchmarks.checkpoint import RESULTS, table
from benchmarks.saving import GOAL


def test_bytes_per_parameter() -> None:
    for result in json.loads((RESULTS / "checkpoint.json").read_text()):
        parameters = result["parameters"]
        first, *others = result["ranks_found"]
        assert result["file_bytes"] / parameters == pytest.approx(12.0, abs=0.1)
        assert (first["weights_bytes"] + first["optimizer_bytes"]) / parameters == pytest.approx(12.0, rel=0.1)
        assert all(found["weights_bytes"] + found["optimizer_bytes"] < 0.1 * parameters for found in others)
        assert "| file, bytes per parameter | 12.0 |" in table(result)


def test_rates_in_the_documentation() -> None:
    text = (RESULTS.parent.parent / "docs" / "checkpoints.md").read_text()
    (kept,) = json.loads((RESULTS / "checkpoint.json").read_text())
    first, gigabytes = kept["ranks_found"][0], kept["file_bytes"] / 1e9
    gathering, writing = first["weights_seconds"] + first["optimizer_seconds"], first["write_seconds"]
    assert f"a file of {gigabytes:.2f} GB, {kept['settings']['ranks']} ranks" in text
    assert f"gathering ran at {gigabytes / gathering:.2f} GB/s" in text
    assert f"writing at {gigabytes / writing:.2f} GB/s" in text
    assert f"`trainer.save_checkpoint` at {gigabytes / first['save_seconds']:.2f} GB/s" in text
    parts, call = ((60 / gigabytes) * seconds / 60 for seconds in (gathering + writing, first["save_seconds"]))
    assert f"that is {parts:.0f} minutes, and {call:.0f} at" in text
    assert f"{100 * parts / 60:.0f} to {100 * call / 60:.0f} % of the time" in text
    saving = json.loads((RESULTS / "saving.json").read_text())
    assert f"{saving['steps']} steps with three saves: {100 * saving['added']:.2f} %" in text


def test_share_of_the_main_example() -> None:
    """The kept result, of whatever machine, is below the goal, and is a share of its own times."""
    found = json.loads((RESULTS / "saving.json").read_text())
    saving = sum(found["saves"])
    assert found["added"] == pytest.approx(saving / (found["seconds"] - saving))
    assert found["added"] <= GOAL
    assert len(found["saves"]) >= 3
