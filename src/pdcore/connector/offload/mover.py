"""Does loads and disk writes, one after the other, beside the steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.offload.blocks import BlockAccess
from pdcore.connector.offload.meta import LoadOrder, Place, SaveOrder
from pdcore.connector.offload.records import HEADER_BYTES, RecordFormat
from pdcore.connector.offload.tiers import DiskTier, HostTier
from pdcore.connector.offload.writes import PendingWrites
from pdcore.connector.stats import TransferStats
from pdcore.errors import TransferError
from pdcore.messages import LoadFailure, TransferKey, TransferReport

__all__ = ["BLOCKS_AT_ONCE", "Mover"]

logger = logging.getLogger(__name__)

Record = npt.NDArray[np.uint8]

BLOCKS_AT_ONCE = 16
_JOIN_S = 30.0


@attrs.define(eq=False)
class _Ended:
    """What a report will say."""

    received: list[TransferKey] = attrs.field(factory=list)
    failed: list[LoadFailure] = attrs.field(factory=list)
    measured: list[TransferStats] = attrs.field(factory=list)


class Mover:
    """Two queues, loads before writes, and what became of the loads.

    A load is checked record by record, and ends at the first one that is not what it should be;
    what came before it is good. Nothing that goes wrong here goes further than its own order.

    Args:
        blocks: the KV memory.
        record_format, host, disk: what is moved; ``disk`` may be None.
        in_background: whether to do it in a thread, from `start` to `close`. Otherwise
            `take_report` does what there is.
    """

    def __init__(
        self,
        blocks: BlockAccess,
        record_format: RecordFormat,
        host: HostTier,
        disk: DiskTier | None,
        *,
        in_background: bool,
    ) -> None:
        self._blocks = blocks
        self._format = record_format
        self._host = host
        self._disk = disk
        self._in_background = in_background
        # Guards all below. The thread waits on it for orders.
        self._changed = threading.Condition()
        self._loads: deque[tuple[float, LoadOrder]] = deque()
        self._writes = PendingWrites()
        self._running: TransferKey | None = None
        self._ended = _Ended()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin work."""
        if self._in_background:
            self._thread = threading.Thread(target=self._run, name="pdcore-offload", daemon=True)
            self._thread.start()

    def forget_writes(self, host_slots: Iterable[int]) -> None:
        """Slots of host memory get other blocks: what still waits to be written from them is not.

        Takes no longer than the copy of one record.
        """
        with self._changed:
            for slot in host_slots:
                self._writes.forget(slot)

    def submit(self, loads: Iterable[LoadOrder], saves: Iterable[SaveOrder]) -> None:
        """Queue loads, and the writes of what was saved. Takes no longer than `forget_writes`."""
        now = time.monotonic()
        with self._changed:
            self._loads += [(now, load) for load in loads]
            if self._disk is not None:
                for save in saves:
                    if save.disk_slot >= 0:
                        self._writes.add(save.host_slot, save.disk_slot)
            self._changed.notify()

    def cancel(self, transfer: TransferKey) -> None:
        """Report a load as failed, unless it runs: then it ends by itself, soon."""
        with self._changed:
            if transfer == self._running:
                return
            self._loads = deque(item for item in self._loads if item[1].transfer != transfer)
            self._ended.failed.append(_failure(transfer, 0, "the load was cancelled"))

    def take_report(self) -> TransferReport:
        """What ended since the last call."""
        while not self._in_background and self._do_next():
            pass
        with self._changed:
            ended, self._ended = self._ended, _Ended()
        return TransferReport(
            finished_recving=tuple(ended.received),
            failed=tuple(ended.failed),
            measured=tuple(ended.measured),
        )

    def close(self) -> None:
        """Finish the disk writes, drop the loads, and join the thread. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._loads.clear()
            self._changed.notify()
        if self._thread is None:
            while self._do_next():
                pass
            self._let_go()
            return
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning("the disk has not answered for %g s; its thread is left", _JOIN_S)

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_next()
        finally:
            self._let_go()

    def _wait(self) -> bool:
        """Wait for an order; return False when there will be none."""
        with self._changed:
            while not (self._loads or self._writes):
                if self._is_closed:
                    return False
                self._changed.wait()
        return True

    def _let_go(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _do_next(self) -> bool:
        """Carry out the next load, or some writes; return whether there was anything."""
        with self._changed:
            queued_at, load = self._loads.popleft() if self._loads else (0.0, None)
            self._running = None if load is None else load.transfer
            has_writes = bool(self._writes)
        if load is not None:
            self._load(load, queued_at)
        elif has_writes:
            self._write()
        return load is not None or has_writes

    def _load(self, order: LoadOrder, queued_at: float) -> None:
        started_at, num_valid, cause = time.monotonic(), 0, None
        try:
            num_valid, cause = self._copy_back(order)
        except Exception as error:
            # Whatever it is, it must not take the thread along.
            logger.warning("load %s failed", order.transfer, exc_info=error)
            cause = f"it could not be read: {error}"
        num_tokens = order.num_local_tokens + num_valid * order.block_size
        stats = TransferStats(
            transfer=order.transfer,
            peer=_source(order.places),
            num_bytes=num_valid * self._format.num_bytes,
            num_blocks=num_valid,
            num_descriptors=num_valid,
            queued_at=queued_at,
            started_at=started_at,
            ended_at=time.monotonic(),
        )
        with self._changed:
            self._running = None
            if cause:
                self._ended.failed.append(_failure(order.transfer, num_tokens, cause))
            else:
                self._ended.received.append(order.transfer)
                self._ended.measured.append(stats)

    def _copy_back(self, order: LoadOrder) -> tuple[int, str | None]:
        """Copy a load's blocks; return how many, and what was wrong with the next one."""
        num_blocks = len(order.block_ids)
        for start in range(0, num_blocks, BLOCKS_AT_ONCE):
            places = order.places[start : start + BLOCKS_AT_ONCE]
            good, fault = self._good_records(places)
            self._blocks.write(list(order.block_ids[start : start + len(good)]), good)
            if fault:
                return start + len(good), fault
        return num_blocks, None

    def _good_records(self, places: tuple[Place, ...]) -> tuple[list[Record], str | None]:
        """The blocks of the records up to the first bad one, and what is wrong with that."""
        read = iter(self._read([place.slot for place in places if place.is_on_disk]))
        good: list[Record] = []
        for place in places:
            record = next(read) if place.is_on_disk else self._host.records[place.slot]
            fault = self._format.fault(record, place.key, is_sealed=place.is_on_disk)
            if fault:
                return good, fault
            good.append(record[HEADER_BYTES:])
        return good, None

    def _read(self, slots: list[int]) -> Iterable[Record]:
        if not slots:
            return ()
        if self._disk is None:
            raise TransferError("there is no disk tier on this rank")
        return self._disk.read(slots)

    def _write(self) -> None:
        """Write some records. What goes wrong is found out when one of them is to be loaded."""
        try:
            assert self._disk is not None
            staging, slots = self._disk.staging(), list[int]()
            while len(slots) < BLOCKS_AT_ONCE:
                # One at a time: whoever saves meanwhile waits for one copy at most.
                with self._changed:
                    if not self._writes:
                        break
                    host_slot, disk_slot = self._writes.pop()
                    np.copyto(staging[len(slots)], self._host.records[host_slot])
                slots.append(disk_slot)
            if slots:
                self._disk.write(slots)
        except Exception as error:
            with self._changed:
                num_lost = self._writes.clear()
            logger.warning("%d blocks or more are not on disk: %s", num_lost + 1, error)


def _failure(transfer: TransferKey, num_valid_tokens: int, cause: str) -> LoadFailure:
    return LoadFailure(transfer=transfer, num_valid_tokens=num_valid_tokens, cause=cause)


def _source(places: tuple[Place, ...]) -> str:
    num_on_disk = sum(place.is_on_disk for place in places)
    if not num_on_disk:
        return "host memory"
    return "disk" if num_on_disk == len(places) else "host memory and disk"
