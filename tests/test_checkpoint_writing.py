"""How the file gets to its place: beside others that are being written, on any file system, under any name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp.checkpoint import AtomicCheckpointIO
from lightning_dcp.checkpoint.temporary import replaced


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_two_that_save_under_one_name_write_two_files(tmp_path: Path) -> None:
    place = tmp_path / "x.ckpt"
    with replaced(place) as first:
        first.write_text("first")
        with replaced(place) as second:
            assert second != first
            second.write_text("second")
            assert first.read_text() == "first", "taken for one that was left"
        assert place.read_text() == "second"
    assert place.read_text() == "first"
    assert names_in(tmp_path) == ["x.ckpt"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "x.ckpt"
    with replaced(place) as part:
        left = part.name
    others = [f".x.ckpt.other.{left[8:]}", ".x.ckpt.part", f".y.ckpt.{left[8:]}"]
    for name in (left, *others):
        (tmp_path / name).write_text("")
    with pytest.raises(RuntimeError, match="full"), replaced(place):
        raise RuntimeError("full")
    assert names_in(tmp_path) == sorted([*others, "x.ckpt"])


def test_a_long_name(tmp_path: Path) -> None:
    name = "\u00e4" * 125 + ".ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / name)
    assert names_in(tmp_path) == [name]
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / name) == {"x": 1}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_folder_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The file is in its place already; a file that cannot be flushed is an error."""
    flush, refused = os.fsync, [stat.S_ISDIR]

    def answer(descriptor: int) -> None:
        if any(kind(os.fstat(descriptor).st_mode) for kind in refused):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", answer)
    place = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, place)
    refused.append(stat.S_ISREG)
    with pytest.raises(OSError, match=os.strerror(number)):
        AtomicCheckpointIO().save_checkpoint({"x": 2}, place)
    assert AtomicCheckpointIO().load_checkpoint(place) == {"x": 1}
    assert names_in(tmp_path) == ["x.ckpt"]


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    place = tmp_path / "x.ckpt"

    def said(content: Any) -> str:
        torch.save(content, place)
        with pytest.raises(Exception, match="x.ckpt") as caught:
            AtomicCheckpointIO().load_checkpoint(place)
        return str(caught.value)

    assert "holds one Tensor and no checkpoint" in said(torch.zeros(2))
