"""Processes that something outside has started: SLURM, nodes by hand, LSF, Kubeflow; wrong numbers end at once."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment as TorchElastic
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_dcp.launching import check_launch
from lightning_dcp.rendezvous import meet
from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Data, Module, assert_same_updates, fit_single, make_strategy, make_trainer
from tests.launching import case_of, read, start, train
from tests.pool import Pool

ROOT = Path(__file__).parents[1]
Variables = dict[str, str]


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def assert_equals_one_process(folder: Path, world_size: int) -> list[dict[str, Any]]:
    rows = read(folder, world_size)
    expected = fit_single(case_of(world_size), rows[0]["result"].plans)
    for row in rows:
        assert_same_updates(row["result"], expected)
    return rows


def slurm(num_nodes: int, per_node: int, **other: str) -> list[Variables]:
    """What srun sets for each task of a step, placed block by block."""
    common = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "dcp",
        "SLURM_NTASKS": str(num_nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})" if num_nodes > 1 else str(per_node),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
        **other,
    }
    return [
        {
            **common,
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_LOCALID": str(rank % per_node),
        }
        for rank in range(num_nodes * per_node)
    ]


def torchrun(num_nodes: int, per_node: int, **other: str) -> list[Variables]:
    """What torchrun sets for each worker, without the agent's store."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "GROUP_RANK": str(rank // per_node),
            "WORLD_SIZE": str(num_nodes * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "TORCHELASTIC_RUN_ID": "x",
            **other,
        }
        for rank in range(num_nodes * per_node)
    ]


def by_hand(nodes: dict[str, int], address: str, port: str, **other: str) -> list[Variables]:
    """What a user sets on each node, and Lightning in each process: processes of each NODE_RANK."""
    return [
        {"NODE_RANK": node, "LOCAL_RANK": str(i), "MASTER_ADDR": address, "MASTER_PORT": port, **other}
        for node, processes in nodes.items()
        for i in range(processes)
    ]


def _script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.feature("Launchers", "SLURM", "variables of srun, two nodes with one task each on one machine")
def test_slurm(tmp_path: Path) -> None:
    """The job script with an srun that writes down its command, which two processes with SLURM's variables then run."""
    srun = tmp_path / "srun"
    dump = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['CALL'], 'w'))"
    srun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{dump}" "$@"\n')
    srun.chmod(0o755)
    job = ROOT / "examples" / "launch" / "slurm.sbatch"
    subprocess.run(["bash", "-n", job], check=True)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALL": str(tmp_path / "call"), "SLURM_CPUS_PER_TASK": "1"}
    program = [str(ROOT / "tests" / "launching.py"), str(tmp_path), "2", "1"]
    subprocess.run(["bash", job, *program], check=True, env={**os.environ, **path}, timeout=60)
    call, environment = json.loads((tmp_path / "call").read_text())
    options = [word for word in call if word.startswith("-")]
    assert options == ["--distribution=block", "--kill-on-bad-exit=1", "-u"]
    assert call[len(options) - 1] == "python"
    assert environment["SRUN_CPUS_PER_TASK"] == "1"
    assert start(_script, slurm(2, 1), call[call.index("-u") + 1 :]) == ["", ""]
    rows = assert_equals_one_process(tmp_path, 2)
    assert [row["environment"] for row in rows] == ["SLURMEnvironment"] * 2
    assert [row["blocks"] for row in rows] == [((0, 2), (0, 1), (1, 1))] * 2
    told = [[text for text in row["warnings"] if "automatic requeue is switched off" in text] for row in rows]
    assert [len(texts) for texts in told] == [1, 0]


@pytest.mark.feature("Launchers", "Kubeflow")
def test_kubeflow(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [{**common, "RANK": str(rank)} for rank in range(2)]
    assert start(_kubeflow, environments, str(tmp_path)) == ["", ""]
    assert [row["environment"] for row in assert_equals_one_process(tmp_path, 2)] == ["KubeflowEnvironment"] * 2


def _kubeflow(folder: str) -> None:
    train(folder, 2, 1, plugins=[KubeflowEnvironment()])


@pytest.mark.feature("Launchers", "LSF")
def test_lsf(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(["launch", *[socket.gethostname()] * 2]))
    common = {
        "LSB_JOBID": "1",
        "LSB_DJOB_RANKFILE": str(hosts),
        "JSM_NAMESPACE_SIZE": "2",
        "MASTER_PORT": free_port(),
    }
    environments = [
        {**common, "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank)} for rank in range(2)
    ]
    assert start(train, environments, str(tmp_path), 1, 2) == ["", ""]
    assert [row["environment"] for row in assert_equals_one_process(tmp_path, 2)] == ["LSFEnvironment"] * 2


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2."""
    names = tuple(f"dcp{os.getpid()}{side}" for side in "ab")
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for number, name in enumerate(names, 1):
        commands += [f"ip -n {name} addr add 10.77.0.{number}/24 dev eth0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("eth0", "lo")]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True, timeout=20)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"no network namespaces here ({command}: {getattr(error, 'stderr', error)})")
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.feature("Launchers", "two nodes", "two network namespaces, two ranks in each")
def test_two_nodes(nodes: tuple[str, str], tmp_path: Path) -> None:
    """Pairs stay inside a node, groups of four cross the cable, and the weights are those of one process."""
    where = [nodes[0], nodes[0], nodes[1], nodes[1]]
    other = {"GLOO_SOCKET_IFNAME": "eth0"}
    hand = by_hand({"0": 2, "1": 2}, "10.77.0.1", "29600", **other)
    assert start(train, hand, str(tmp_path), 2, 2, namespaces=where) == [""] * 4
    rows = assert_equals_one_process(tmp_path, 4)
    used = {(m.first_rank, m.sp_size) for plan in rows[0]["result"].plans for m in _micro_batches(plan)}
    assert {size for _, size in used} == {1, 2, 4}
    assert {first for first, size in used if size == 2} <= {0, 2}
    twice = by_hand({"0": 1}, "10.77.0.1", "29602", **other) * 2
    for answer in start(_wrong, twice, {"0": 1}, namespaces=nodes):
        assert "came as rank 0, which another process is already; give each node its own NODE_RANK" in answer
    elastic = torchrun(2, 2, MASTER_ADDR="10.77.0.1", MASTER_PORT="29601", **other)
    assert start(train, elastic, str(tmp_path), 2, 2, namespaces=where) == [""] * 4
    again = assert_equals_one_process(tmp_path, 4)
    assert [row["environment"] for row in again] == ["TorchElasticEnvironment"] * 4
    assert [row["blocks"][:3] for row in (*rows, *again)] == [((0, 4), (0, 2), (2, 2))] * 8


def _micro_batches(plan: str) -> Any:
    from lightning_dcp.plan import IterationPlan

    return IterationPlan.from_json(plan).micro_batches


def _wrong(devices_of_node: dict[str, int]) -> None:
    train("/nowhere", 2, devices_of_node[os.environ["NODE_RANK"]])


def test_nodes_that_were_told_different_numbers() -> None:
    """Both ends raise the same sentence within seconds, where torch would wait for half an hour."""
    port = free_port()
    answers = start(_wrong, by_hand({"0": 2, "1": 1}, "127.0.0.1", port), {"0": 2, "1": 1})
    assert len(set(answers)) == 1
    assert "node 1 has Trainer(num_nodes=2, devices=1) and its process came as rank 1, node 0 has " in answers[0]
    assert "Trainer(num_nodes=2, devices=2); give all nodes the same numbers" in answers[0]


def _impatient(address: str, port: str) -> None:
    meet(address, int(port), timedelta(seconds=1), rank=1, num_nodes=2, num_processes=1, node_rank=1)


def test_a_node_that_is_alone() -> None:
    port = free_port()
    (answer,) = start(_impatient, [{}], "127.0.0.1", port)
    assert (
        f"rank 1 (node 1) did not meet the 2 processes of num_nodes=2 and devices=1 at 127.0.0.1:{port}" in answer
    )


@pytest.mark.parametrize(
    ("environment", "variables", "numbers", "sentence"),
    [
        (
            TorchElastic,
            torchrun(1, 2)[1],
            (1, 1),
            "2 processes were started .* devices=1. asks for 1; num_nodes times",
        ),
        (TorchElastic, torchrun(2, 2)[0], (1, 2), "4 processes were started .* asks for 2"),
        (TorchElastic, {**torchrun(2, 2)[0], "LOCAL_WORLD_SIZE": "3"}, (2, 2), r"the nodes run \[3\] processes"),
        (SLURMEnvironment, slurm(2, 2)[0], (2, 4), "4 processes were started .SLURMEnvironment.* asks for 8"),
        (
            SLURMEnvironment,
            slurm(2, 2, SLURM_STEP_TASKS_PER_NODE="3,1")[0],
            (2, 2),
            r"the nodes run \[3, 1\] processes .* asks for 2 on each; every node has to run the same number",
        ),
        (SLURMEnvironment, slurm(2, 2, SLURM_DISTRIBUTION="cyclic")[0], (2, 2), "srun --distribution=block"),
        (
            SLURMEnvironment,
            {**slurm(2, 2)[1], "SLURM_LOCALID": "0"},
            (2, 2),
            "global rank 1 is process 0 of its node .* ranks of a node have to follow one another",
        ),
        (LightningEnvironment, {}, (2, 2), "without MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment"),
        (
            LightningEnvironment,
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "2"},
            (2, 2),
            "NODE_RANK is 2, and .* allows 0 to 1",
        ),
    ],
)
def test_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch,
    environment: Any,
    variables: Variables,
    numbers: tuple[int, int],
    sentence: str,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = environment()
    with pytest.raises(MisconfigurationException, match=sentence):
        check_launch(made, *numbers)
    with pytest.raises(MisconfigurationException, match=sentence):
        pl.Trainer(
            strategy=DCPStrategy(), accelerator="cpu", num_nodes=numbers[0], devices=numbers[1], plugins=[made],
            logger=False,
        )  # fmt: skip


def test_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [(TorchElastic, torchrun(2, 2)), (SLURMEnvironment, slurm(2, 2)), (SLURMEnvironment, slurm(1, 4))]
    for environment, processes in launches:
        for variables in processes:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                nodes = 1 if variables.get("SLURM_NNODES") == "1" else 2
                check_launch(environment(), nodes, 4 // nodes)


def _smaller() -> str:
    case = case_of(1)
    trainer = make_trainer(make_strategy(case), case, devices=1, plugins=[LightningEnvironment()])
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(Module(case), datamodule=Data(case))
    return str(caught.value)


def test_a_trainer_of_another_size_in_connected_processes(pool: Pool) -> None:
    """Two ranks that each took themselves for alone averaged their gradients all the same."""
    for message in pool.run(_smaller, 2):
        assert message.startswith("torch.distributed already connects 2 processes, and this Trainer asks for 1")
