"""What the adversary does to reads and to notices, inside of an engine's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
from chaos_messages import NoticeFault, ReadFault

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.client import PeerClient
from pdcore.connector.nixl.meta import NixlMeta
from pdcore.connector.nixl.protocol import Message
from pdcore.connector.nixl.worker_side import NixlWorkerConnector
from pdcore.errors import PeerLost

__all__ = ["WireFaults"]

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@attrs.define(eq=False)
class _SlowRead:
    """A read that the wire has not brought yet. It stands for NIXL's handle."""

    fault: ReadFault
    due: float
    local_ids: Int32Array
    remote_ids: Int32Array
    handle: Any = None


class WireFaults:
    """Slows reads, loses completions, and drops, delays and repeats notices, as it is told.

    `install` puts it between the connector and the outside, for the whole process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_uid: dict[int, ReadFault] = {}
        self._by_blocks: dict[frozenset[int], ReadFault] = {}
        self._notices: dict[str, list[NoticeFault]] = defaultdict(list)

    def expect(
        self, *, uid: int, transfer_id: str, read: ReadFault | None, notices: Iterable[NoticeFault]
    ) -> None:
        """Be ready for one request's first read, and for its ticket's notices."""
        with self._lock:
            if read is not None:
                self._by_uid[uid] = read
            for fault in notices:
                self._notices[transfer_id] += [fault] * fault.count

    def install(self) -> None:
        """Wrap what moves bytes and messages."""
        self._wrap_worker()
        self._wrap_agent()
        self._wrap_client()

    def _wrap_worker(self) -> None:
        start_load_kv = NixlWorkerConnector.start_load_kv

        def start(worker: NixlWorkerConnector, meta: NixlMeta | None) -> None:
            with self._lock:
                for task in meta.reads if meta is not None else ():
                    fault = self._by_uid.pop(task.transfer.uid, None)
                    if fault is not None:
                        self._by_blocks[frozenset(task.local_block_ids.tolist())] = fault
            start_load_kv(worker, meta)

        NixlWorkerConnector.start_load_kv = start  # type: ignore[method-assign,assignment]

    def _wrap_agent(self) -> None:
        post_read, poll = TransferAgent.post_read, TransferAgent.poll
        release, destroy = TransferAgent.release, TransferAgent.destroy

        def post_slowly(agent: TransferAgent, local: Int32Array, remote: Int32Array) -> Any:
            with self._lock:
                fault = self._by_blocks.pop(frozenset(local.tolist()), None)
            if fault is None:
                return post_read(agent, local, remote)
            return _SlowRead(fault, time.monotonic() + fault.delay_s, local, remote), False

        def poll_slowly(agent: TransferAgent, handle: Any) -> bool:
            if not isinstance(handle, _SlowRead):
                return poll(agent, handle)
            if time.monotonic() < handle.due:
                return False
            is_done = False
            if handle.handle is None:
                handle.handle, is_done = post_read(agent, handle.local_ids, handle.remote_ids)
            is_done = is_done or poll(agent, handle.handle)
            return is_done and not handle.fault.is_lost

        def release_real(agent: TransferAgent, handle: Any) -> None:
            release(agent, handle.handle if isinstance(handle, _SlowRead) else handle)

        def destroy_real(agent: TransferAgent, handles: list[Any]) -> None:
            real = [each.handle if isinstance(each, _SlowRead) else each for each in handles]
            handles.clear()
            destroy(agent, [handle for handle in real if handle is not None])

        TransferAgent.post_read = post_slowly  # type: ignore[method-assign,assignment]
        TransferAgent.poll = poll_slowly  # type: ignore[method-assign,assignment]
        TransferAgent.release = release_real  # type: ignore[method-assign,assignment]
        TransferAgent.destroy = destroy_real  # type: ignore[method-assign,assignment]

    def _wrap_client(self) -> None:
        ask = PeerClient.ask

        async def ask_through_faults(client: PeerClient, request: Message) -> Message:
            fault = self._next_fault(request)
            if fault is None:
                return await ask(client, request)
            if fault.kind == "delay":
                await asyncio.sleep(fault.delay_s)
            if fault.kind != "drop":
                reply = await ask(client, request)
            if fault.kind == "repeat":
                reply = await ask(client, request)
            if fault.kind in ("drop", "lose reply"):
                timeout_s = client._config.request_timeout_s
                await asyncio.sleep(timeout_s)
                raise PeerLost(f"{client.where} did not answer within {timeout_s:g} s")
            return reply

        PeerClient.ask = ask_through_faults  # type: ignore[method-assign,assignment]

    def _next_fault(self, request: Message) -> NoticeFault | None:
        with self._lock:
            faults = self._notices.get(getattr(request, "transfer_id", ""), [])
            for fault in faults:
                if fault.message == type(request).__name__:
                    faults.remove(fault)
                    return fault
        return None
