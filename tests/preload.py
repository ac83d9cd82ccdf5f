"""Imported once by the fork server, so that every forked worker has the slow imports already."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - every first engine imports it, for nearly a second
import lightning  # noqa: F401
import torch

import lightning_dcp.strategy  # noqa: F401
from lightning_dcp.engine import skip_cpu_operator

torch.set_num_threads(1)
skip_cpu_operator()
