"""Imported once by the fork server, so that every forked worker has the slow imports already."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed  # noqa: F401
import lightning  # noqa: F401
import torch

from lightning_dcp.engine import skip_cpu_operator

torch.set_num_threads(1)
skip_cpu_operator()
