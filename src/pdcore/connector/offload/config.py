"""Settings of the offload connector."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from pdcore.checks import check_count, check_flag, check_positive
from pdcore.errors import ConfigError

__all__ = ["OffloadConfig"]


def _as_path(directory: str | os.PathLike[str] | None) -> Path | None:
    try:
        return None if directory is None else Path(directory)
    except TypeError:
        raise ConfigError(f"directory={directory!r:.80}: must be a path, or None") from None


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """How much is kept outside the block pool, and where.

    Args:
        host_bytes: host memory of each rank for blocks; taken at once, when the KV memory is
            registered.
        disk_bytes: room of each rank on disk; taken at once too. 0 keeps nothing on disk. Needs
            the extra ``nixl``.
        directory: where the files are. Whoever can write there can alter what the model reads, so
            it should belong to the engine's user alone.
        persistent: whether the next engine with this directory finds the blocks of this one, unless
            its prefix cache was reset. Then the manager's `PrefixHasher` needs a configured
            secret, since blocks are found by the names that it gives. Otherwise the
            files have no name and vanish with the process.
        background: whether loads and disk writes run in a thread of their own. Without it they
            run when the worker is asked for its report: for simulations, which must repeat exactly.
        poll_s: how often a loop that only waits for loads asks its workers.
        host_bytes_per_s, disk_bytes_per_s: what each tier delivers to one rank, for
            `ExternalMatch.load_s`.

    Raises:
        ConfigError: a setting is out of its range, or there is a disk and no directory.
    """

    host_bytes: int
    disk_bytes: int = 0
    directory: Path | None = attrs.field(default=None, converter=_as_path)
    persistent: bool = False
    background: bool = True
    poll_s: float = 0.001
    host_bytes_per_s: float = 4e9
    disk_bytes_per_s: float = 1e9

    def __attrs_post_init__(self) -> None:
        for name, least in (("host_bytes", 1), ("disk_bytes", 0)):
            check_count(name, getattr(self, name), at_least=least)
        for name in ("poll_s", "host_bytes_per_s", "disk_bytes_per_s"):
            check_positive(name, getattr(self, name))
        check_flag("persistent", self.persistent)
        check_flag("background", self.background)
        if self.disk_bytes and self.directory is None:
            raise ConfigError(
                f"disk_bytes={self.disk_bytes} without a directory: say where the files go"
            )
        if self.persistent and not self.disk_bytes:
            raise ConfigError("persistent=True without disk_bytes: host memory does not outlive us")
