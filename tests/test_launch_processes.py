"""Real processes: torchrun with a restart, and signals to Lightning's own launcher and its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fitting import assert_same_updates, fit_single
from tests.launching import VARIABLES, begin, case_of, endless, finish, read

ROOT = Path(__file__).parents[1]

FAILS_ONCE = """
import os, sys
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit("a worker that fails at first")
from tests.launching import train
train(sys.argv[1], 1, 2)
"""


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.feature("Launchers", "torchrun", "with a restart after a worker failed")
def test_torchrun_starts_the_workers_again(tmp_path: Path) -> None:
    """The example's script, as it is; the groups of the first attempt left their keys in the agent's store."""
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NPROC_PER_NODE": "2",
        "MAX_RESTARTS": "1",
    }
    done = subprocess.run(
        [ROOT / "examples" / "launch" / "torchrun.sh", tmp_path / "train.py", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "a worker that fails at first" in done.stderr
    rows = read(tmp_path, 2)
    expected = fit_single(case_of(2), rows[0]["result"].plans)
    for row in rows:
        assert_same_updates(row["result"], expected)
        assert row["environment"] == "TorchElasticEnvironment"
        assert row["restarts"] == "1"


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.feature(
    "Launchers", "Ctrl-C and SIGTERM", "no process is left; SIGTERM ends all ranks after one step"
)
@pytest.mark.parametrize(
    ("sent", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)], ids=["SIGTERM-1", "SIGINT-0"]
)
def test_a_signal_to_one_process_ends_all(tmp_path: Path, sent: signal.Signals, rank: int) -> None:
    """Rank 0 is the launcher. After SIGTERM to any rank all callbacks see the same exception after the same step."""
    launcher = begin(endless, [{"PYTHONPATH": str(ROOT)}], str(tmp_path))
    pids = []
    try:
        for file in (tmp_path / f"pid {rank}" for rank in range(2)):
            deadline = time.monotonic() + 120
            while not (file.exists() and file.read_text()) and launcher[0][0].is_alive():
                assert time.monotonic() < deadline, "no step was trained"
                time.sleep(0.05)
            pids.append(int(file.read_text()))
        os.kill(pids[rank], sent)
        finish(launcher)
        deadline = time.monotonic() + 60
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in pids if _runs(pid)]
    finally:
        for pid in pids:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
    ended = [file.read_text() for file in tmp_path.glob("ended *")]
    if sent == signal.SIGTERM:
        assert len(ended) == 2
        assert len(set(ended)) == 1, ended
        assert ended[0].startswith("SIGTERMException ")
    else:
        assert (tmp_path / f"ended {rank}").read_text().startswith("KeyboardInterrupt ")


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie, which waits for its parent only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
