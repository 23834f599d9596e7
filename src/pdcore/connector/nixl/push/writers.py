"""Sending blocks to peers as they become complete, off the model's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdcore.clock import Clock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import PeerInfo, PushStop, PushTask
from pdcore.connector.nixl.mover import MoveResult
from pdcore.connector.nixl.push.rank_push import RankPush
from pdcore.connector.nixl.push.writer import PeerWriter, Write
from pdcore.errors import TransferError
from pdcore.messages import PushReport, TransferKey

__all__ = ["PushWriters"]

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class PushWriters:
    """Writes this rank's blocks to peers, each peer on a thread and with an agent of its own.

    The writes of one push follow each other: the next is posted when the last one has arrived. So
    when a push begins anew, nothing of its earlier beginnings can land on what it sends now. After
    a write that failed a push sends nothing more.

    `order`, `send`, `take_reports` and `close` are for the worker's thread.

    Args:
        region: the rank's KV memory.
        config: the connector's settings.
        rank: which rank this is.
        clock: for the stall limit.
        notify: called, on any thread, when there is something to report.
    """

    def __init__(
        self,
        region: MemoryRegion,
        *,
        config: NixlConfig,
        rank: int,
        clock: Clock,
        notify: Callable[[], None],
    ) -> None:
        self._region = region
        self._config = config
        self._rank = rank
        self._clock = clock
        self._notify = notify
        self._lock = threading.Lock()
        self._due: tuple[PushTask, ...] = ()
        self._due_stops: tuple[PushStop, ...] = ()
        self._pushes: dict[str, RankPush] = {}
        self._by_serial: dict[int, RankPush] = {}
        self._num_pushes = 0
        self._writers: dict[str, PeerWriter] = {}
        self._reports: list[PushReport] = []
        self._is_closed = False

    def order(self, tasks: tuple[PushTask, ...], stops: tuple[PushStop, ...]) -> None:
        """Take a step's orders; `send` begins them. Orders of an earlier step that never came to
        `send`, because its forward pass failed, are forgotten."""
        self._due, self._due_stops = tasks, stops

    def send(self) -> None:
        """The step's forward pass was begun: send what it completes, on a device once its kernels
        have ended. Waits for those, if there is something to send."""
        tasks, self._due = self._due, ()
        stops, self._due_stops = self._due_stops, ()
        if tasks and self._region.mem_type == "VRAM":
            _wait_for_kernels(self._region.device_id)
        for task in tasks:
            self._send(task)
        for stop in stops:
            self._stop(stop)

    def take_reports(self) -> tuple[PushReport, ...]:
        """The pushes that ended since the last call."""
        if not self._reports:
            return ()
        with self._lock:
            reports, self._reports = self._reports, []
        return tuple(reports)

    def close(self) -> None:
        """Stop every write, close every agent, join every thread."""
        with self._lock:
            # A write that ends meanwhile would begin the next one, with a new writer.
            self._is_closed = True
            writers, self._writers = list(self._writers.values()), {}
        for writer in writers:
            writer.stop()
        for writer in writers:
            if not writer.join(_JOIN_TIMEOUT_S):
                logger.error("%r did not stop within %g s", writer, _JOIN_TIMEOUT_S)

    def _send(self, task: PushTask) -> None:
        with self._lock:
            push = self._pushes.get(task.push_id)
            if push is None:
                self._num_pushes += 1
                push = RankPush(push_id=task.push_id, serial=self._num_pushes)
                self._pushes[task.push_id] = self._by_serial[push.serial] = push
            push.add(task)
            write = self._take_next(push)
        self._begin(push, write)

    def _stop(self, stop: PushStop) -> None:
        with self._lock:
            push = self._pushes.get(stop.push_id)
            if push is None:
                # Nothing was ever ordered of it, or its report got lost with its step.
                self._reports.append(
                    PushReport(
                        push_id=stop.push_id,
                        attempt=-1,
                        rank=self._rank,
                        num_blocks=0,
                        cause="nothing is known of it here",
                        was_cut=True,
                    )
                )
                return
            push.must_report = True
            if not stop.is_wanted:
                push.give_up("nobody wants it any more")
            write = self._take_next(push)
        self._begin(push, write)

    def _take_next(self, push: RankPush) -> PushTask | None:
        """The next write of a push, or None: then one is under way, or there is none, which is
        reported if somebody asked.

        The lock is held, from the moment at which the last write was seen to have ended: else the
        worker's thread and a writer's could both find that there is nothing left, and both report.
        """
        if push.flying is not None:
            return None
        if self._is_closed:
            push.waiting.clear()
        push.flying = push.waiting.popleft() if push.waiting else None
        if push.flying is None and push.must_report:
            del self._pushes[push.push_id], self._by_serial[push.serial]
            self._reports.append(push.report(self._rank))
            self._notify()
        return push.flying

    def _begin(self, push: RankPush, task: PushTask | None) -> None:
        if task is None:
            return
        try:
            self._writer_for(task.peer).submit(
                Write(
                    transfer=TransferKey(push.serial, task.attempt),
                    local_block_ids=task.block_ids,
                    remote_block_ids=task.slots,
                )
            )
        except Exception as error:
            logger.exception("no writer for %s", task.peer.name)
            self._write_ended(push, f"no writer for {task.peer.name}: {error!r}")

    def _writer_for(self, peer: PeerInfo) -> PeerWriter:
        """Called by whoever sends next: the worker's thread, or a writer's own for its own peer."""
        with self._lock:
            if self._is_closed:
                raise TransferError("this engine is closing")
            writer = self._writers.get(peer.peer_id)
            if writer is None:
                self._retire_idle()
                writer = self._writers[peer.peer_id] = PeerWriter(
                    self._region,
                    peer,
                    rank=self._rank,
                    clock=self._clock,
                    stall_timeout_s=self._config.stall_timeout_s,
                    idle_timeout_s=self._config.idle_peer_timeout_s,
                    report=self._take_result,
                )
            return writer

    def _retire_idle(self) -> None:
        busy = {push.flying.peer.peer_id for push in self._pushes.values() if push.flying}
        for peer_id, writer in tuple(self._writers.items()):
            if writer.is_idle and peer_id not in busy:
                writer.stop()
                del self._writers[peer_id]

    def _take_result(self, result: MoveResult[Write]) -> None:
        """A write ended. On a writer's thread."""
        with self._lock:
            push = self._by_serial[result.task.transfer.uid]
        self._write_ended(push, result.cause)

    def _write_ended(self, push: RankPush, cause: str) -> None:
        with self._lock:
            push.end_write(cause)
            write = self._take_next(push)
        self._begin(push, write)

    def __repr__(self) -> str:
        with self._lock:
            num_flying = sum(push.flying is not None for push in self._pushes.values())
            return (
                f"<PushWriters {len(self._pushes)} pushes, {num_flying} being written, "
                f"{len(self._reports)} to report; {list(self._writers.values())}>"
            )


def _wait_for_kernels(device_id: int) -> None:
    import torch

    torch.cuda.current_stream(device_id).synchronize()
