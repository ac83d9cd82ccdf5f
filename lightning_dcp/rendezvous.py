"""Nodes that were started by hand compare their numbers before they wait for each other's processes.

``torch.distributed`` waits for as many processes as each node believes in, half an hour by default, when one was
given other numbers. A launcher that spans the nodes (torchrun, srun) tells all of them the same.
"""

from __future__ import annotations

from datetime import timedelta
from time import sleep

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_PLACE = "lightning_dcp/launch"
_FAREWELL = 2.0
"""Seconds for which rank 0 keeps the store open after a refusal, so that the others can read the reason."""


def compare_numbers(store: Store, *, rank: int, num_nodes: int, num_processes: int, node_rank: int) -> None:
    """Come back when all ranks are here and have the same numbers; called by every rank once, a few small messages.

    Args:
        store: that of the first node.
        rank: global rank, as this process sees it.
        num_nodes: as given to the Trainer.
        num_processes: devices of this node.
        node_rank: number of this node.

    Raises:
        MisconfigurationException: on all ranks that came; numbers differ, or a rank came twice.
        RuntimeError: the others did not come within the store's time limit.
    """
    mine = f"num_nodes={num_nodes}, devices={num_processes}"
    if rank == 0 and store.add(f"{_PLACE}/claims/0", 1) == 1:
        store.set(f"{_PLACE}/numbers", mine)
    first = store.get(f"{_PLACE}/numbers").decode()
    here = f"node {node_rank} has Trainer({mine}) and its process came as rank {rank}"
    if first != mine:
        _refuse(store, f"{here}, node 0 has Trainer({first}); give all nodes the same numbers")
    elif store.add(f"{_PLACE}/claims/{rank}", 1) > (2 if rank == 0 else 1):
        _refuse(store, f"{here}, which another process is already; give each node its own NODE_RANK, from 0")
    elif store.add(f"{_PLACE}/came", 1) == num_nodes * num_processes:
        store.compare_set(f"{_PLACE}/verdict", "", "fits")
    verdict = store.get(f"{_PLACE}/verdict").decode()
    if verdict != "fits":
        sleep(_FAREWELL if rank == 0 else 0.0)
        raise MisconfigurationException(verdict)


def meet(
    address: str, port: int, timeout: timedelta, *, rank: int, num_nodes: int, num_processes: int, node_rank: int
) -> Store:
    """Open the store of the first node and compare numbers; keep what is returned until the process group exists.

    The process group's own store shares the server of this one, which is why the port serves both.

    Raises:
        MisconfigurationException: numbers differ, or not all ranks came in time.
    """
    try:
        store = TCPStore(
            address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        compare_numbers(store, rank=rank, num_nodes=num_nodes, num_processes=num_processes, node_rank=node_rank)
    except RuntimeError as error:
        raise MisconfigurationException(
            f"rank {rank} (node {node_rank}) did not meet the {num_nodes * num_processes} processes of "
            f"num_nodes={num_nodes} and devices={num_processes} at {address}:{port} within {timeout} "
            f"({str(error).splitlines()[0]}); start all nodes, with MASTER_ADDR and a free MASTER_PORT of the first "
            "and their own NODE_RANK"
        ) from error
    return store


def _refuse(store: Store, reason: str) -> None:
    store.compare_set(f"{_PLACE}/verdict", "", reason)
