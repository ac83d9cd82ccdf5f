"""A notebook: one process works as it is, several are forked when asked for, and the weights come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Result, assert_same_updates, fit_single
from tests.launching import VARIABLES, case_of

ROOT = Path(__file__).parents[1]


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.feature("Launchers", "notebook", 'one process; several with `strategy="dcp_notebook"`')
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """A real interactive session. Lightning-AI/pytorch-lightning#7550: only fork starts processes there."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"PYTHONPATH": str(ROOT)}
    code = f"from tests.notebook import run; run({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-i", "-c", code],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (tmp_path / "shown.json").exists(), done.stderr[-4000:]
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["alone"] > 0.01
    assert shown["initialised"]
    assert "by fork in a session that has already trained on one device" in shown["late"]
    assert "Restart the session" in shown["late"]
    assert "DCPStrategy with 2 processes in an interactive session" in shown["refusal"]
    assert 'Use Trainer(strategy="dcp_notebook")' in shown["refusal"]
    assert (shown["dcp_notebook"], shown["dcp_fork"]) == ("ForkLauncher", "ForkLauncher")

    plans = json.loads((tmp_path / "plans.json").read_text())
    start, weights, plans_here = torch.load(tmp_path / "weights.pt", weights_only=False)
    assert plans_here == [], "the fit ran in this process"
    expected = fit_single(case_of(2), plans)
    assert_same_updates(Result(start=start, weights=weights, losses=[], plans=plans), expected)
    assert shown["metrics"]["loss"] == pytest.approx(expected.losses[-1], rel=1e-5)
    assert shown["best"] == str(tmp_path / Path(shown["best"]).name)
    assert Path(shown["best"]).exists()
    assert (tmp_path / "last.ckpt").exists()
    assert shown["devices"] == ["cpu"]
    assert "Calling `trainer.fit()` twice on the same Trainer" in shown["again"]
    assert shown["predictions"] is None
    assert shown["left"] == []
    seen = [int(n) for rank in range(2) for n in (tmp_path / f"predicted{rank}").read_text().split()]
    assert sum(seen) == 16
    assert list(tmp_path.parent.glob("**/.temp.ckpt")) == []


def test_other_ways_to_start_are_refused() -> None:
    with pytest.raises(ValueError, match="start_method is 'spawn'; allowed are 'popen' .* and 'fork'"):
        DCPStrategy(start_method="spawn")  # type: ignore[arg-type]
