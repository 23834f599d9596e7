"""The offload connector's half beside the model: it holds the bytes."""

from __future__ import annotations

from typing import Any

import attrs

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.nixl.agent import load_nixl
from pdcore.connector.offload.blocks import BlockAccess, block_access
from pdcore.connector.offload.config import OffloadConfig
from pdcore.connector.offload.meta import OffloadHandshake, OffloadMeta
from pdcore.connector.offload.mover import BLOCKS_AT_ONCE, Mover
from pdcore.connector.offload.records import RecordFormat
from pdcore.connector.offload.store import RecordStore
from pdcore.connector.offload.tiers import DiskTier, HostTier
from pdcore.errors import ConfigError
from pdcore.messages import TransferReport

__all__ = ["OffloadWorkerConnector"]


@attrs.frozen(eq=False)
class _Parts:
    """What exists once the KV memory is known."""

    blocks: BlockAccess
    record_format: RecordFormat
    host: HostTier
    mover: Mover
    store: RecordStore | None
    handshake: OffloadHandshake


class OffloadWorkerConnector(WorkerConnector):
    """Saves and loads what the scheduler's half orders. Made by `OffloadConnector`.

    Saves are copies to host memory on the worker's own thread, before the step begins: a step is
    held up by the copy of its saves and by nothing else. Loads and disk writes have a thread.
    """

    def __init__(self, config: OffloadConfig, *, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._parts: _Parts | None = None
        self._num_resets = 0

    def register_kv_caches(self, caches: KVCaches) -> None:
        """Take the memory of both tiers, and look what an earlier engine left on disk.

        Raises:
            ConfigError: there is no room, or the KV memory is not one piece.
            MissingExtra: there is to be a disk tier, and NIXL is not installed.
        """
        record_format = RecordFormat(
            f"{caches.fingerprint}/rank{self._rank}", caches.bytes_per_block
        )
        num_host_slots = self._config.host_bytes // record_format.record_bytes
        if num_host_slots < 1:
            raise ConfigError(
                f"host_bytes={self._config.host_bytes} does not hold one block of "
                f"{record_format.record_bytes} bytes: give it more"
            )
        blocks = block_access(caches)
        host = HostTier(record_format, num_host_slots)
        store = self._open_store(record_format)
        disk = None
        if store is not None:
            disk = DiskTier(record_format, store, num_staged=BLOCKS_AT_ONCE)
        handshake = OffloadHandshake(
            num_blocks=caches.num_blocks,
            bytes_per_block=caches.bytes_per_block,
            num_host_slots=num_host_slots,
            num_disk_slots=0 if store is None else store.num_slots,
            stored=() if store is None else tuple(store.entries()),
        )
        mover = Mover(blocks, record_format, host, disk, in_background=self._config.background)
        self._parts = _Parts(blocks, record_format, host, mover, store, handshake)
        mover.start()

    def get_handshake_metadata(self) -> OffloadHandshake:
        """How much room there is and what is there.

        Raises:
            ConfigError: `register_kv_caches` was not called.
        """
        return self._known().handshake

    def start_save_kv(self, meta: Any) -> None:
        if not isinstance(meta, OffloadMeta):
            return
        parts = self._known()
        if meta.num_resets > self._num_resets:
            if parts.store is not None:
                # The next engine counts its resets anew: to it, old records would be good.
                parts.store.forget_name()
            self._num_resets = meta.num_resets
            parts.record_format.reset(meta.num_resets)
        if meta.saves:
            parts.mover.forget_writes(order.host_slot for order in meta.saves)
            parts.host.save(meta.saves, parts.blocks)

    def start_load_kv(self, meta: Any) -> None:
        if not isinstance(meta, OffloadMeta):
            return
        mover = self._known().mover
        mover.submit(meta.loads, meta.saves)
        for transfer in meta.cancelled:
            mover.cancel(transfer)

    def get_finished(self) -> TransferReport:
        return TransferReport() if self._parts is None else self._parts.mover.take_report()

    def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.mover.close()

    def _known(self) -> _Parts:
        if self._parts is None:
            raise ConfigError(
                "the KV memory is not known: initialise the model runner first, and use nothing "
                "after close()"
            )
        return self._parts

    def _open_store(self, record_format: RecordFormat) -> RecordStore | None:
        config = self._config
        if not config.disk_bytes or config.directory is None:
            return None
        load_nixl()
        return RecordStore(
            config.directory,
            record_format=record_format,
            rank=self._rank,
            num_bytes=config.disk_bytes,
            persistent=config.persistent,
        )
