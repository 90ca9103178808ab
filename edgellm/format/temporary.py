"""The temporary that a file is until it is complete, what it must not replace, and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "create_temporary",
    "lock_folder",
    "refuse_inputs",
    "remove_stale",
    "reserve",
    "sync_folder",
    "write_at",
]


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuses an output that is one of the inputs, or a file in one that is a folder.

    Raises:
        ValueError: It is.
    """
    for path in inputs if output.exists() else ():
        for file in path.iterdir() if path.is_dir() else (path,):
            if file.exists() and output.samefile(file):
                raise ValueError(f"{output} is read by this command: name another output")


def remove_stale(path: Path) -> None:
    """Removes temporaries of `path` whose writer was killed: nobody holds their lock."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.tmp")
    for entry in list(os.scandir(path.parent)):
        if not pattern.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # in use, or gone: then it is not ours to remove
            file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(file)


def lock_folder(folder: Path) -> int:
    """Makes a folder if need be and locks it, where the file system has locks.

    Returns:
        A descriptor; closing it, or the end of the process, lets go of the lock.

    Raises:
        BlockingIOError: Someone has it.
        OSError: The folder cannot be made.
    """
    while True:
        folder.mkdir(exist_ok=True)
        try:
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # its last user has just removed it
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise
        except OSError:  # no locks here
            pass
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def create_temporary(path: Path) -> tuple[int, Path]:
    """A new, locked file beside `path`; again if remove_stale of another process was faster."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o666)
        with contextlib.suppress(OSError):  # without locks, nobody's remove_stale will get one
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, temporary
        os.close(file)


def reserve(file: int, size: int) -> None:
    """Allocates `size` bytes on the disk, or raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    # macOS, or a file system that cannot: the best that can be known beforehand
    volume = os.fstatvfs(file)
    if volume.f_bavail * volume.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`."""
    while data.nbytes:
        count = os.pwrite(file, data, offset)
        data = data[count:]
        offset += count


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
