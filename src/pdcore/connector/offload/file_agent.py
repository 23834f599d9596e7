"""Moves records between memory and a file, through NIXL's POSIX backend."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.nixl.agent import load_nixl
from pdcore.errors import TransferError

__all__ = ["FileAgent"]

logger = logging.getLogger(__name__)

Records = npt.NDArray[np.uint8]

_BACKEND = ["POSIX"]
_POLL_S = 0.0002


class FileAgent:
    """One NIXL agent over one piece of memory and one file. One thread owns it.

    Rows of the memory and slots of the file have the size of a record; neighbours on both sides are
    moved as one piece. After an error nobody knows what still moves: `close` the agent, leave its
    memory alone, and make another.

    Args:
        memory: uint8 (n, record_bytes).
        fd: the file.
        num_slots: how many records it holds.

    Raises:
        MissingExtra: NIXL is not installed.
        TransferError: the POSIX backend does not start.
    """

    def __init__(self, memory: Records, *, fd: int, num_slots: int) -> None:
        module, self._errors = load_nixl()
        # Kept, since the agent knows the memory by its address alone.
        self._memory = memory
        num_rows, size = memory.shape
        name = f"pdcore-offload-{uuid.uuid4()}"
        config = module.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            backends=[],
        )
        self._lists: list[Any] = []
        self._registered: list[Any] = []
        try:
            self._agent: Any = module.nixl_agent(name, config)
            self._agent.create_backend("POSIX", {})
            address = memory.ctypes.data
            self._register([(address, memory.nbytes, 0, "")], "DRAM")
            rows = np.array([[address, size, 0, size, num_rows]], np.uint64)
            self._rows = self._prepare("NIXL_INIT_AGENT", rows, "DRAM")
            self._register([(0, num_slots * size, fd, "")], "FILE")
            slots = np.array([[0, size, fd, size, num_slots]], np.uint64)
            self._slots = self._prepare(name, slots, "FILE")
        except self._errors as error:
            raise TransferError(f"NIXL's POSIX backend: {type(error).__name__}") from None

    def write(self, slots: list[int]) -> None:
        """Write the first rows of the memory to these slots of the file, and wait for it.

        Raises:
            TransferError: not all of it was written.
        """
        self._move("WRITE", slots)

    def read(self, slots: list[int]) -> None:
        """Read these slots of the file into the first rows of the memory, and wait for it.

        Raises:
            TransferError: not all of it was read.
        """
        self._move("READ", slots)

    def close(self) -> None:
        """Let go of file and memory, the latter when nothing moves any more. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        try:
            for prepared in self._lists:
                prepared.release()
            for registered in self._registered:
                agent.deregister_memory(registered, backends=_BACKEND)
        except self._errors as error:
            logger.warning("NIXL's POSIX agent did not close cleanly: %s", type(error).__name__)
        self._lists.clear()
        self._registered.clear()

    def _move(self, operation: str, slots: list[int]) -> None:
        rows = np.arange(len(slots), dtype=np.int32)
        try:
            handle = self._agent.make_prepped_xfer(
                operation,
                self._rows,
                rows,
                self._slots,
                np.array(slots, np.int32),
                b"",
                backends=_BACKEND,
            )
            try:
                state = self._agent.transfer(handle)
                while state == "PROC":
                    time.sleep(_POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                # Also after an error: memory must not be deregistered under a handle.
                self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise TransferError(f"{operation} of {len(slots)} records ended as {state}")
        except self._errors as error:
            raise TransferError(
                f"{operation} of {len(slots)} records failed ({type(error).__name__})"
            ) from None

    def _register(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self._registered.append(self._agent.register_memory(regions, kind, backends=_BACKEND))

    def _prepare(self, name: str, rows: npt.NDArray[np.uint64], kind: str) -> Any:
        prepared = self._agent.prep_xfer_dlist(name, rows, kind, backends=_BACKEND)
        self._lists.append(prepared)
        return prepared
