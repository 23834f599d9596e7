"""The bytes of the saved blocks: host memory, and behind it the disk."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from pdcore.connector.offload.blocks import BlockAccess
from pdcore.connector.offload.file_agent import FileAgent
from pdcore.connector.offload.meta import SaveOrder
from pdcore.connector.offload.records import HEADER_BYTES, RecordFormat
from pdcore.connector.offload.store import RecordStore
from pdcore.errors import ConfigError, TransferError

__all__ = ["DiskTier", "HostTier"]

logger = logging.getLogger(__name__)

Records = npt.NDArray[np.uint8]

_MAX_NUM_ERRORS = 3


class HostTier:
    """Host memory for records. Whoever gives out its slots sees to it that none is used twice.

    Args:
        record_format: of the records.
        num_slots: how many fit.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(self, record_format: RecordFormat, num_slots: int) -> None:
        self._format = record_format
        shape = (num_slots, record_format.record_bytes)
        try:
            # Filled, not only asked for: else the steps that save would pay for each new page.
            self.records: Records = np.full(shape, 0, np.uint8)
        except MemoryError as error:
            raise ConfigError(f"host memory for {num_slots} blocks: {error}") from error

    def save(self, orders: tuple[SaveOrder, ...], blocks: BlockAccess) -> None:
        """Copy blocks into their slots. Costs the copy, and some microseconds a block."""
        slots = [order.host_slot for order in orders]
        # No record is there while its bytes are not, should the copy fail.
        self.records[slots, :HEADER_BYTES] = 0
        targets = [self.records[slot, HEADER_BYTES:] for slot in slots]
        blocks.read([order.block_id for order in orders], targets)
        for order in orders:
            self._format.stamp(self.records[order.host_slot], order.key)


class DiskTier:
    """The disk's records, written from and read into a staging area. One thread uses it.

    After an error the agent is made anew, with another staging area: what it had under way may
    still move. After three errors in a row the disk counts as broken, and everything fails at once.

    Args:
        record_format: of the records.
        store: the file.
        num_staged: the most records of one read or write.
    """

    def __init__(self, record_format: RecordFormat, store: RecordStore, *, num_staged: int) -> None:
        self._format = record_format
        self._store = store
        self.num_staged = num_staged
        self._num_errors = 0
        self._staging: Records | None = None
        self._agent: FileAgent | None = None
        self._broken: FileAgent | None = None

    def staging(self) -> Records:
        """The staging area, uint8 (num_staged, record_bytes).

        Raises:
            TransferError: the disk is broken.
        """
        return self._connected()[1]

    def write(self, slots: list[int]) -> None:
        """Seal the first records of the staging area, and write them to these slots.

        Raises:
            TransferError: not all of them were written.
        """
        agent, staging = self._connected()
        for row in range(len(slots)):
            self._store.last_number += 1
            self._format.seal(staging[row], self._store.last_number)
        try:
            agent.write(slots)
        except TransferError as error:
            self._disconnect(error)
            raise
        self._num_errors = 0

    def read(self, slots: list[int]) -> Records:
        """Read up to `num_staged` records; valid until the next call.

        Whether they are what they should be is for `RecordFormat.fault` to say, also after an
        error: what did arrive is good.

        Raises:
            TransferError: the disk is broken.
        """
        agent, staging = self._connected()
        # All of it: what an earlier read left must not complete a record that is cut short now.
        staging[: len(slots)] = 0
        try:
            agent.read(slots)
            self._num_errors = 0
        except TransferError as error:
            # Something may still land in that memory: look at a copy, and never use it again.
            self._disconnect(error)
            return staging[: len(slots)].copy()
        return staging[: len(slots)]

    def close(self) -> None:
        """Let go of the agent, then of the file. May be called twice."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
        self._staging = None
        self._store.close()

    def _connected(self) -> tuple[FileAgent, Records]:
        if self._num_errors >= _MAX_NUM_ERRORS:
            raise TransferError(f"the disk failed {self._num_errors} times in a row: not used now")
        if self._agent is None or self._staging is None:
            self._staging = np.zeros((self.num_staged, self._format.record_bytes), np.uint8)
            self._agent = FileAgent(
                self._staging, fd=self._store.fd, num_slots=self._store.num_slots
            )
        return self._agent, self._staging

    def _disconnect(self, error: Exception) -> None:
        self._num_errors += 1
        logger.warning("KV on disk: %s (error %d in a row)", error, self._num_errors)
        # Kept until the next error: its memory must outlive what is still under way.
        self._broken, self._agent, self._staging = self._agent, None, None
        if self._broken is not None:
            self._broken.close()
