"""The file beside its place that is written first: one for every save, and none that stays for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = ".part"
_RANDOM_BYTES = 8
_NAME_BYTES = 200
"""Of the place's name; with the rest it stays below the 255 bytes that file systems allow."""

_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""What network and FUSE file systems answer that cannot flush, or open, a folder."""


@contextmanager
def replaced(place: Path) -> Iterator[Path]:
    """An empty file beside a place that takes it over, flushed to the disk, when the block ends without an error.

    Its name is ``.NAME.RANDOM.part``, so two processes that save under one name write two files, and the later one
    wins. A file of that name that no process holds any more, since it was killed, is removed first.

    Raises:
        OSError: the file could not be written; what was at the place before is left.
    """
    _remove_left(place)
    part, descriptor = _created(place)
    try:
        yield part
        os.fsync(descriptor)
        os.replace(part, place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _flush_folder(place.parent)


def _created(place: Path) -> tuple[Path, int]:
    """A new file, locked for as long as its descriptor is open: that is what tells it from one that was left."""
    while True:
        part = place.with_name(f"{_prefix(place)}{secrets.token_hex(_RANDOM_BYTES)}{_ENDING}")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _locked(descriptor)
        # Another process may have taken it for one that was left, before it was locked.
        if part.exists():
            return part, descriptor
        os.close(descriptor)


def _remove_left(place: Path) -> None:
    prefix = _prefix(place)
    length = len(prefix) + 2 * _RANDOM_BYTES + len(_ENDING)
    for name in sorted(os.listdir(place.parent)):
        if not (name.startswith(prefix) and name.endswith(_ENDING) and len(name) == length):
            continue
        part = place.with_name(name)
        try:
            descriptor = os.open(part, os.O_RDWR)
        except OSError:
            # Its process has just finished, or it is another user's.
            continue
        if _locked(descriptor):
            part.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether this process holds the file now; never where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _prefix(place: Path) -> str:
    return f".{os.fsdecode(os.fsencode(place.name)[:_NAME_BYTES])}."


def _flush_folder(folder: Path) -> None:
    """Have the entries of a folder written to the disk, where its file system does that; the file is in place."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_FOR_FOLDERS:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(descriptor)
