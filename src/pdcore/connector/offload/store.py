"""The file of the disk tier: records in equal slots, which say themselves whose they are."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from pdcore.connector.offload.records import HEADER_BYTES, RecordFormat
from pdcore.errors import ConfigError

__all__ = ["RecordStore"]


class RecordStore:
    """One rank's file.

    The headers of its records are its index, so no crash can make the two disagree; to read them
    costs one small read a slot, once. A named file is one for each fingerprint and rank: files of
    other models stand beside it unharmed, and their room comes on top until somebody deletes them.

    Args:
        directory: where the file goes; made if it does not exist.
        record_format: of the records.
        rank: whose they are.
        num_bytes: the room for records.
        persistent: whether the file has a name, under which the next engine finds it.

    Attributes:
        fd: the file, `num_slots` times `RecordFormat.record_bytes` long.
        last_number: of the newest record, once `entries` has looked.

    Raises:
        ConfigError: there is no room, no right to write, or another engine uses the file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        record_format: RecordFormat,
        rank: int,
        num_bytes: int,
        persistent: bool,
    ) -> None:
        self.num_slots = num_bytes // record_format.record_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"disk_bytes={num_bytes} does not hold one record of {record_format.record_bytes}"
            )
        self._format = record_format
        self._path: Path | None = None
        self.fd = -1
        self.last_number = 0
        name = f"{record_format.digest[:16].hex()}-rank{rank}.kv"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if persistent:
                self.fd, self._path = _open_named(directory / name), directory / name
            else:
                self.fd = _open_nameless(directory)
            _take_room(self.fd, self.num_slots * record_format.record_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{num_bytes} bytes for KV in {directory} cannot be had: {error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def entries(self) -> list[tuple[int, bytes]]:
        """An earlier engine's records, as far as their headers say: (slot, key), oldest first."""
        if self._path is None:
            return []
        found: dict[bytes, tuple[int, int]] = {}
        for slot in range(self.num_slots):
            data = os.pread(self.fd, HEADER_BYTES, slot * self._format.record_bytes)
            header = self._format.header(data)
            if header is not None:
                newest = max(found.get(header.key, (-1, -1)), (header.number, slot))
                found[header.key] = newest
        self.last_number = max((number for number, _ in found.values()), default=0)
        return [(slot, key) for key, (_, slot) in sorted(found.items(), key=lambda it: it[1])]

    def forget_name(self) -> None:
        """Let no later engine find the file: what is in it was void, or will be. May be repeated.

        Raises:
            ConfigError: there is no right to do so.
        """
        if self._path is None:
            return
        try:
            # Somebody may have deleted it before, and another engine have one there now.
            if _is_at(self.fd, self._path):
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self._path} holds KV from before a reset and cannot be deleted: {error}"
            ) from error
        self._path = None

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _open_named(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, path)
            # Its last user may have deleted the name just before it let go of the lock.
            if _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise ConfigError(
            f"another engine keeps its KV in {path}: give each engine a directory of its own"
        ) from error


def _is_at(fd: int, path: Path) -> bool:
    """Whether a path names this open file, and not another one or none."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _open_nameless(directory: Path) -> int:
    """A file that nobody finds, and whose room is free again when the process ends, however."""
    fd, name = tempfile.mkstemp(dir=directory, prefix="pdcore-kv-")
    os.unlink(name)
    return fd


def _take_room(fd: int, num_bytes: int) -> None:
    """Make a file so long, with its room taken now: a full disk is found at the start."""
    os.ftruncate(fd, num_bytes)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
