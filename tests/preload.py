"""Imported once by the fork server, so that every forked worker has the slow imports already."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed  # noqa: E402, F401
import lightning  # noqa: E402, F401
import torch  # noqa: E402

from lightning_dcp.engine import skip_cpu_operator  # noqa: E402

torch.set_num_threads(1)
skip_cpu_operator()
