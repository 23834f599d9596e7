"""NIXL by itself, as fast as it goes: one list of descriptors, polled without a pause."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.nixl.agent import load_nixl

__all__ = ["RawAgent"]

Int32Array = npt.NDArray[np.int32]


class RawAgent:
    """One agent over one buffer that is cut into pieces of equal size.

    Args:
        name: of the agent.
        buffer: the memory.
        num_regions: into how many regions it is cut, each with the same number of pieces: 1 for
            blocks that are contiguous, 2 x layers for a layout by layers.
        num_blocks: pieces in a region.
    """

    def __init__(
        self, name: str, buffer: npt.NDArray[Any], *, num_regions: int, num_blocks: int
    ) -> None:
        module, _ = load_nixl()
        config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = module.nixl_agent(name, config)
        self._agent.create_backend("UCX", {})
        self._num_regions, self._num_blocks = num_regions, num_blocks
        self._piece = buffer.nbytes // (num_regions * num_blocks)
        self.address = buffer.ctypes.data
        self._registered = self._agent.register_memory(
            [(self.address, buffer.nbytes, 0, "")], "DRAM"
        )
        self._local = self._prepare("NIXL_INIT_AGENT", self.address)
        self._remote: Any = None
        self._peer: Any = None

    def metadata(self) -> bytes:
        """What the other side's `connect` needs."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes, address: int) -> None:
        """Make a buffer of the same layout readable."""
        self._peer = self._agent.add_remote_agent(metadata)
        self._remote = self._prepare(self._peer, address)

    def read(self, local_ids: Int32Array, remote_ids: Int32Array) -> float:
        """Read blocks pairwise; return milliseconds from the request to the last byte.

        The list is prepared before, and in it every piece of every block is one entry; NIXL merges
        those neighbours that it can.
        """
        local, remote = self._pieces(local_ids), self._pieces(remote_ids)
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", self._local, local, self._remote, remote)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        took_s = time.perf_counter() - began
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the read ended as {state}")
        return 1e3 * took_s

    def progress(self) -> None:
        """Let a reader get on."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Let go of the memory."""
        for prepared in (self._remote, self._local):
            if prepared is not None:
                prepared.release()
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)

    def _prepare(self, name: Any, address: int) -> Any:
        stride = self._num_blocks * self._piece
        rows = [
            (address + region * stride, self._piece, 0, self._piece, self._num_blocks)
            for region in range(self._num_regions)
        ]
        return self._agent.prep_xfer_dlist(name, np.array(rows, np.uint64), "DRAM")

    def _pieces(self, block_ids: Int32Array) -> Int32Array:
        """Region by region, as engines with a layout by layers list them."""
        offsets = np.arange(self._num_regions, dtype=np.int32)[:, None] * self._num_blocks
        return np.ascontiguousarray((offsets + block_ids).reshape(-1), np.int32)
