"""Lightning's DeepSpeed strategy, also on CPU over gloo."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_dcp.engine import skip_cpu_operator


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """A ``DeepSpeedStrategy`` that does not insist on CUDA, and starts no launcher for a single process."""

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
        # One process needs no launcher, and a notebook refuses every strategy that has one.
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the process group."""
        if self.root_device.type == "cuda":
            super().setup_environment()
        else:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            skip_cpu_operator()
            # DeepSpeedStrategy's own method does nothing but refuse other devices than CUDA.
            DDPStrategy.setup_environment(self)
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    """Without this, about one gloo process in ten dies at exit after its work is done."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
