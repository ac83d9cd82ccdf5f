"""Lightning's DeepSpeed strategy, also on CPU over gloo, and started in every way that Lightning knows."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_dcp.engine import skip_cpu_operator
from lightning_dcp.launching import (
    check_fork,
    check_launch,
    check_notebook,
    check_start_method,
    check_world,
    without_requeue,
)
from lightning_dcp.rendezvous import meet
from lightning_dcp.upstream import ForkLauncher, is_interactive

StartMethod = Literal["popen", "fork"]


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """A ``DeepSpeedStrategy`` that does not insist on CUDA, and starts no launcher for a single process.

    Args:
        start_method: how Lightning starts the processes where no launcher outside of it does: ``"popen"`` runs the
            script again for each, ``"fork"`` needs no script.
        kwargs: as in Lightning's ``DeepSpeedStrategy``.

    Raises:
        ValueError: another start method.
    """

    def __init__(self, *, start_method: StartMethod = "popen", **kwargs: Any) -> None:
        check_start_method(start_method)
        super().__init__(**kwargs)
        self._start_method = start_method
        self._own_variables: set[str] = set()

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of the node's ranks; CPU devices are numbered, since Lightning compares their index to the rank."""
        devices = self._parallel_devices
        if devices is None or any(device.type != "cpu" for device in devices):
            return devices
        return [torch.device("cpu", index) for index in range(len(devices))]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        check_launch(environment, self.num_nodes, self.num_processes)
        # One process needs no launcher, and a notebook refuses every strategy that has one.
        if self.num_processes * self.num_nodes == 1:
            return
        if environment.creates_processes_externally:
            super()._configure_launcher()
            return
        check_notebook(self._start_method, self.num_processes * self.num_nodes, is_interactive())
        if self._start_method == "fork":
            self._launcher = ForkLauncher(self, lambda: check_fork(dist.is_initialized()))
        else:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the process group."""
        if dist.is_initialized():
            check_world(dist.get_world_size(), self.num_nodes * self.num_processes)
        without_requeue(self.cluster_environment)
        store = self._meet_nodes()
        known = set(os.environ)
        if self.root_device.type == "cuda":
            super().setup_environment()
        else:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            skip_cpu_operator()
            # DeepSpeedStrategy's own method does nothing but refuse other devices than CUDA.
            DDPStrategy.setup_environment(self)
        del store  # the process group's own store lives in the same server by now
        self._own_variables = set(os.environ) - known if self.launcher is None else set()
        atexit.register(_leave_process_group)

    def teardown(self) -> None:
        """Take the variables of a launch back where there was none: the next Trainer would take itself for launched."""
        for name in self._own_variables:
            os.environ.pop(name, None)
        super().teardown()

    def _meet_nodes(self) -> object | None:
        """Compare numbers with the other nodes where nobody else has; ``None`` where that is needless."""
        environment = self.cluster_environment
        if self.num_nodes == 1 or dist.is_initialized() or not isinstance(environment, LightningEnvironment):
            return None
        return meet(
            environment.main_address,
            environment.main_port,
            self._timeout or timedelta(minutes=30),
            rank=self.node_rank * self.num_processes + self.local_rank,
            num_nodes=self.num_nodes,
            num_processes=self.num_processes,
            node_rank=self.node_rank,
        )


def _leave_process_group() -> None:
    """Without this, about one gloo process in ten dies at exit after its work is done."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
