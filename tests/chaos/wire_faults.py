"""What the adversary does to reads, writes and notices, inside of an engine's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
import numpy as np
from chaos_messages import NoticeFault, TransferFault

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.client import PeerClient
from pdcore.connector.nixl.meta import NixlMeta
from pdcore.connector.nixl.protocol import Message
from pdcore.connector.nixl.worker_side import NixlWorkerConnector
from pdcore.errors import PeerLost

__all__ = ["WireFaults"]

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


@attrs.define(eq=False)
class _SlowTransfer:
    """A read or write that the wire has not done yet. It stands for NIXL's handle."""

    fault: TransferFault
    due: float
    post: Callable[[], tuple[Any, bool]]
    handle: Any = None


class WireFaults:
    """Slows transfers, loses completions, and drops, delays and repeats notices, as it is told.

    `install` puts it between the connector and the outside, for the whole process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[int, TransferFault] = {}
        self._writes: dict[str, TransferFault] = {}
        self._by_blocks: dict[tuple[str, frozenset[int]], TransferFault] = {}
        self._notices: dict[str, list[NoticeFault]] = defaultdict(list)

    def expect_read(
        self,
        *,
        uid: int,
        transfer_id: str,
        fault: TransferFault | None,
        notices: Iterable[NoticeFault],
    ) -> None:
        """Be ready for one request's first read, and for its ticket's notices."""
        with self._lock:
            if fault is not None:
                self._reads[uid] = fault
            self._expect_notices(transfer_id, notices)

    def expect_writes(
        self, *, push_id: str, fault: TransferFault | None, notices: Iterable[NoticeFault]
    ) -> None:
        """Be ready for one push's first write, and for its notices."""
        with self._lock:
            if fault is not None:
                self._writes[push_id] = fault
            self._expect_notices(push_id, notices)

    def _expect_notices(self, about: str, notices: Iterable[NoticeFault]) -> None:
        for fault in notices:
            self._notices[about] += [fault] * fault.count

    def install(self) -> None:
        """Wrap what moves bytes and messages."""
        self._wrap_worker()
        self._wrap_post("post_read")
        self._wrap_post("post_write")
        self._wrap_agent()
        self._wrap_client()

    def _wrap_worker(self) -> None:
        start_load_kv = NixlWorkerConnector.start_load_kv

        def start(worker: NixlWorkerConnector, meta: NixlMeta | None) -> None:
            if meta is not None:
                with self._lock:
                    self._meet(meta)
            start_load_kv(worker, meta)

        NixlWorkerConnector.start_load_kv = start  # type: ignore[method-assign,assignment]

    def _meet(self, meta: NixlMeta) -> None:
        """Find the transfers that something is to befall, by the blocks here that they move."""
        for read in meta.reads:
            if (fault := self._reads.pop(read.transfer.uid, None)) is not None:
                ids = read.local_block_ids
                ids = ids if read.staged_slots is None else ids[read.staged_slots < 0]
                self._by_blocks["post_read", frozenset(ids.tolist())] = fault
        for write in meta.pushes:
            if (fault := self._writes.pop(write.push_id, None)) is not None:
                self._by_blocks["post_write", frozenset(write.block_ids.tolist())] = fault

    def _wrap_post(self, name: str) -> None:
        post = getattr(TransferAgent, name)

        def post_slowly(agent: TransferAgent, local: Int32Array, remote: Int32Array) -> Any:
            with self._lock:
                fault = self._by_blocks.pop((name, frozenset(local.tolist())), None)
            if fault is None:
                return post(agent, local, remote)
            if fault.breaks:
                raise PeerLost("the wire broke")
            post_later = partial(post, agent, local, remote)
            return _SlowTransfer(fault, time.monotonic() + fault.delay_s, post_later), False

        setattr(TransferAgent, name, post_slowly)

    def _wrap_agent(self) -> None:
        poll, release, destroy = TransferAgent.poll, TransferAgent.release, TransferAgent.destroy

        def poll_slowly(agent: TransferAgent, handle: Any) -> bool:
            if not isinstance(handle, _SlowTransfer):
                return poll(agent, handle)
            if time.monotonic() < handle.due:
                return False
            is_done = False
            if handle.handle is None:
                handle.handle, is_done = handle.post()
            is_done = is_done or poll(agent, handle.handle)
            return is_done and not handle.fault.is_lost

        def release_real(agent: TransferAgent, handle: Any) -> None:
            release(agent, handle.handle if isinstance(handle, _SlowTransfer) else handle)

        def destroy_real(agent: TransferAgent, handles: list[Any]) -> None:
            real = [each.handle if isinstance(each, _SlowTransfer) else each for each in handles]
            handles.clear()
            destroy(agent, [handle for handle in real if handle is not None])

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
            about = getattr(request, "transfer_id", "") or getattr(request, "push_id", "")
            faults = self._notices.get(about, [])
            for fault in faults:
                if fault.message == type(request).__name__:
                    faults.remove(fault)
                    return fault
        return None
