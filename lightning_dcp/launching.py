"""Whether the numbers of a launch fit together, found out before anything can hang."""

from __future__ import annotations

import os
import re

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

START_METHODS = ("popen", "fork")


def check_start_method(start_method: str) -> None:
    """Refuse ways to start processes that would have to pickle the strategy and its data.

    Raises:
        ValueError: neither ``"popen"`` nor ``"fork"``.
    """
    if start_method not in START_METHODS:
        raise ValueError(
            f"start_method is {start_method!r}; allowed are 'popen' (run the script once for each process) and 'fork' "
            "(for notebooks). Launch by torchrun, srun or mpirun needs neither"
        )


def check_notebook(start_method: str, num_processes: int, interactive: bool) -> None:
    """Say what works in a notebook: Lightning's refusal names a strategy of its own.

    Raises:
        MisconfigurationException: several processes would have to run a script that does not exist.
    """
    if interactive and start_method == "popen":
        raise MisconfigurationException(
            f"DCPStrategy with {num_processes} processes in an interactive session: the processes would have to run a "
            'script, and there is none. Use Trainer(strategy="dcp_notebook") or DCPStrategy(start_method="fork"), '
            "before anything has touched CUDA, or Trainer(devices=1), which needs no further process"
        )


def check_fork(connected: bool) -> None:
    """Refuse to fork a process that has trained by itself: now and then its forked processes waited for ever.

    Args:
        connected: whether this process is in a process group, whose threads a forked process lacks.

    Raises:
        MisconfigurationException: it is.
    """
    if connected:
        raise MisconfigurationException(
            "several processes were asked for by fork in a session that has already trained on one device: forked "
            "processes lack the threads of its process group and can hang. Restart the session, and fit on several "
            "processes first; a fit on one device may come after"
        )


def check_launch(environment: ClusterEnvironment, num_nodes: int, num_processes: int) -> None:
    """Compare ``Trainer(num_nodes=..., devices=...)`` with the processes that were started.

    Every rank looks at what its own environment says, so that ranks of a wrong launch end where they start instead
    of waiting for others that will never come.

    Args:
        environment: where the processes come from.
        num_nodes: as given to the Trainer.
        num_processes: devices of this node.

    Raises:
        MisconfigurationException: with what was started, what the Trainer asks for and what to do.
    """
    name = type(environment).__name__
    asked = f"Trainer(num_nodes={num_nodes}, devices={num_processes})"
    if isinstance(environment, LightningEnvironment):
        _check_by_hand(asked, num_nodes, environment.node_rank())
        return
    started = environment.world_size()
    if started != num_nodes * num_processes:
        raise MisconfigurationException(
            f"{started} processes were started ({name}), and {asked} asks for {num_nodes * num_processes}; num_nodes "
            "times devices has to be the number of processes. Change the Trainer's arguments or those of the launch"
        )
    per_node = _processes_by_node(environment)
    if per_node and set(per_node) != {num_processes}:
        raise MisconfigurationException(
            f"the nodes run {per_node} processes ({name}), and {asked} asks for {num_processes} on each; every node "
            "has to run the same number. Start as many processes on each node as it has devices"
        )
    rank, local_rank = environment.global_rank(), environment.local_rank()
    if _is_scattered(environment, num_processes) or rank % num_processes != local_rank:
        raise MisconfigurationException(
            f"global rank {rank} is process {local_rank} of its node ({name}), with {num_processes} processes on each: "
            "the ranks of a node have to follow one another, since sequence-parallel groups are laid out inside "
            "nodes. Number the processes node by node (srun --distribution=block, mpirun --map-by slot)"
        )


def check_world(running: int, asked: int) -> None:
    """Refuse a Trainer of another size in processes that an earlier one has already connected.

    Raises:
        MisconfigurationException: gradients would be averaged over other ranks than those that are planned for.
    """
    if running != asked:
        raise MisconfigurationException(
            f"torch.distributed already connects {running} processes, and this Trainer asks for {asked} under "
            'DCPStrategy; allowed is the same number in one run of the script. Use strategy="auto" for work on one '
            "device, or another run of the script"
        )


def without_requeue(environment: ClusterEnvironment | None) -> None:
    """Switch SLURM's automatic requeue off, which Lightning switches on, and say so.

    Its signal handler saves a checkpoint, which all ranks have to do together, wherever each of them happens to be.
    """
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        environment.auto_requeue = False
        rank_zero_warn(
            "SLURM's automatic requeue is switched off, since it would save on ranks that are at different "
            "micro-batches: use ModelCheckpoint(every_n_train_steps=..., save_last=True), submit with --requeue and "
            'resume with ckpt_path="last" (to silence this: plugins=[SLURMEnvironment(auto_requeue=False)])'
        )


def _check_by_hand(asked: str, num_nodes: int, node_rank: int) -> None:
    """Without a launcher that spans the nodes, the user says on each of them where they meet."""
    if num_nodes == 1:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    missing += ["NODE_RANK"] if not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() else []
    if missing:
        raise MisconfigurationException(
            f"{asked} without {', '.join(missing)} in the environment: on several nodes each node has to be told the "
            "address and a free port of the first, and its own number from 0. Set them, or launch with torchrun or srun"
        )
    if not 0 <= node_rank < num_nodes:
        raise MisconfigurationException(
            f"NODE_RANK is {node_rank}, and {asked} allows 0 to {num_nodes - 1}; number the nodes from 0"
        )


def _processes_by_node(environment: ClusterEnvironment) -> list[int]:
    """Processes of each node, or of this one, where the environment tells; else empty."""
    if isinstance(environment, TorchElasticEnvironment) and "LOCAL_WORLD_SIZE" in os.environ:
        return [int(os.environ["LOCAL_WORLD_SIZE"])]
    if isinstance(environment, SLURMEnvironment):
        # "2(x3),1": three nodes with two tasks, one with one.
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]
    return []


def _is_scattered(environment: ClusterEnvironment, num_processes: int) -> bool:
    """Whether SLURM deals the tasks out over the nodes in turn: some ranks cannot see it from their own numbers."""
    if (
        not isinstance(environment, SLURMEnvironment)
        or num_processes == 1
        or environment.world_size() == num_processes
    ):
        return False
    return os.environ.get("SLURM_DISTRIBUTION", "block").startswith("cyclic")
