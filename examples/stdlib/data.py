"""The Python standard library of the running interpreter as training text: real data that everyone has.

Each top-level function or class is one sample, as bytes. Most are short and a few are very long.
"""

from __future__ import annotations

import ast
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from lightning_dcp import DCPDataModule  # dcp

# Some installations come without the tests; without them the samples are the same everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def definitions(source: str) -> Iterator[bytes]:
    """The top-level functions and classes of a module, with their decorators, in order."""
    lines = source.encode().splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield b"".join(lines[first - 1 : node.end_lineno])


def standard_library(root: Path | None = None) -> list[bytes]:
    """All samples, in the order of the files' paths.

    Args:
        root: folder to read instead of the running interpreter's standard library.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    samples: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            with tokenize.open(path) as file:
                samples += definitions(file.read())
    return samples


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples as token tensors ``[S]``; a token is a byte."""

    def __init__(self, samples: Sequence[bytes]) -> None:
        self.samples = samples
        self.lengths = [len(sample) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample; the labels are made from it later."""
        return {"input_ids": torch.frombuffer(bytearray(self.samples[index]), dtype=torch.uint8).long()}


class StandardLibrary(DCPDataModule):  # dcp
    """Samples cut at ``max_bytes``; every ``held_out_every``-th is kept from training.

    Args:
        global_batch_size: samples of one optimizer step, over all processes.
        max_bytes: where a longer sample is cut.
        held_out_every: one of so many samples is held out.
        num_workers: processes that read ahead.
    """

    def __init__(
        self,
        global_batch_size: int = 64,
        max_bytes: int = 4096,
        held_out_every: int = 200,
        num_workers: int = 0,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, shift_labels=True)  # dcp
        self.max_bytes, self.held_out_every = max_bytes, held_out_every
        self.held_out: list[bytes] = []

    def setup(self, stage: str) -> None:
        """Read and cut the samples and say how much was cut."""
        whole = standard_library()
        cut = [sample[: self.max_bytes] for sample in whole]
        num_cut = sum(len(sample) > self.max_bytes for sample in whole)
        lost = 1.0 - sum(map(len, cut)) / sum(map(len, whole))
        rank_zero_info(
            f"{len(whole)} functions and classes of the standard library; {num_cut / len(whole):.1%} of them were "
            f"cut at {self.max_bytes} bytes, {lost:.1%} of all bytes with it"
        )
        self.held_out = cut[:: self.held_out_every]
        kept = [sample for index, sample in enumerate(cut) if index % self.held_out_every]
        self.train_dataset = Samples(kept)  # dcp
