"""Moving blocks from or to one peer, on a thread of its own, with an agent of its own."""

from __future__ import annotations

import logging
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.clock import Clock
from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.blocks import merge_order, num_runs
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import PeerInfo
from pdcore.connector.stats import TransferStats
from pdcore.errors import PeerLost
from pdcore.messages import TransferKey

__all__ = ["Move", "MoveResult", "PeerMover"]

logger = logging.getLogger(__name__)

_POLL_FAST_S = 0.0002
_POLL_SLOW_S = 0.001
_FAST_FOR_S = 0.05
_CALL_EVERY_S = 0.5


class Move(Protocol):
    """Blocks to move: the i-th local one from or to the i-th remote one."""

    @property
    def transfer(self) -> TransferKey:
        """Names the move."""

    @property
    def local_block_ids(self) -> npt.NDArray[np.int32]:
        """In this engine's memory."""

    @property
    def remote_block_ids(self) -> npt.NDArray[np.int32]:
        """In the peer's, as many."""


MoveT = TypeVar("MoveT", bound=Move)


@attrs.frozen(kw_only=True)
class MoveResult(Generic[MoveT]):
    """How one move ended: with its measurements, or with a cause."""

    task: MoveT
    stats: TransferStats | None = None
    cause: str = ""


@attrs.define(eq=False, kw_only=True)
class _Flight(Generic[MoveT]):
    task: MoveT
    handle: Any
    queued_at: float
    started_at: float
    num_descriptors: int


def _call_nobody(transfer: TransferKey) -> None:
    """For those whose peers are woken by somebody else."""


class PeerMover(ABC, Generic[MoveT]):
    """Moves blocks from or to one peer. What happens to this peer cannot touch another's mover.

    Every move that was submitted is reported exactly once, and only when its blocks are left alone:
    its data is there, or it was never posted, or the agent that ran it is gone. NIXL cannot stop a
    single transfer, so one failure ends all moves of this peer; the agent is then destroyed, and
    the next move builds a new one.

    Args:
        region: the local KV memory.
        peer: whom to read from or write to.
        rank: which of the peer's ranks.
        clock: for measurements and the stall limit.
        stall_timeout_s: with moves in flight and none of them ending for so long, the peer is cut
            off. A hung peer gives no other sign.
        idle_timeout_s: without a move for so long, the agent is closed to save its resources.
        report: takes each result, on the mover's thread.
        call_peer: told of a move that did not end when it was posted, which ends only if the peer's
            workers look for it. On the mover's thread; again from time to time.
    """

    verb: ClassVar[str]
    """What it does, for people."""

    def __init__(
        self,
        region: MemoryRegion,
        peer: PeerInfo,
        *,
        rank: int,
        clock: Clock,
        stall_timeout_s: float,
        idle_timeout_s: float,
        report: Callable[[MoveResult[MoveT]], None],
        call_peer: Callable[[TransferKey], None] = _call_nobody,
    ) -> None:
        self._region = region
        self._peer = peer
        self._endpoint = peer.ranks[rank]
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._report = report
        self._call_peer = call_peer
        self._called_at = -math.inf
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._agent: TransferAgent | None = None
        self._waiting: dict[TransferKey, tuple[MoveT, float]] = {}
        self._flying: dict[TransferKey, _Flight[MoveT]] = {}
        self._last_progress = clock.now()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"pdcore-nixl-{self.verb}-{peer.peer_id[:8]}", daemon=True
        )
        self._thread.start()

    def submit(self, task: MoveT) -> None:
        """Queue a move; returns at once."""
        self._orders.put(partial(self._enqueue, task, self._clock.now()))

    def cancel(self, transfer: TransferKey) -> None:
        """Drop a move that was not posted yet. One that was posted runs to its end."""
        self._orders.put(partial(self._drop, transfer))

    def cut_off(self, cause: str) -> None:
        """Stop all moves by force."""
        self._orders.put(partial(self._break, cause))

    @property
    def is_idle(self) -> bool:
        """Whether it holds no agent, so that ending it costs nothing. For the submitting thread."""
        return self._agent is None and self._orders.empty() and not self._waiting

    def stop(self) -> None:
        """Stop all moves by force and end the thread; returns at once, see `join`."""
        self._orders.put(self._stop)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `stop`; return whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # What follows runs on the mover's thread alone.

    def _run(self) -> None:
        while not self._closing:
            # An exception's traceback holds handles, which keep transfers alive. So the peer is
            # dropped only after the exception is gone.
            cause = self._advance()
            if cause is not None:
                self._break(cause)

    def _advance(self) -> str | None:
        """Do what there is to do; return what went wrong, if anything did."""
        try:
            self._take_orders()
            self._post_next()
            self._poll_flying()
        except PeerLost as error:
            return str(error)
        except Exception as error:
            logger.error("the %s of %s failed: %r", self.verb, self._peer.name, error)
            return f"an internal error of the {self.verb}: {error!r}"
        return None

    def _take_orders(self) -> None:
        try:
            order = self._orders.get(timeout=self._patience_s())
        except queue.Empty:
            if not self._flying and not self._waiting:
                self._close_agent()
            return
        order()
        while not self._orders.empty():
            self._orders.get()()

    def _patience_s(self) -> float:
        if self._waiting:
            return 0.0
        if not self._flying:
            return self._idle_timeout_s
        waited = self._clock.now() - self._last_progress
        return _POLL_FAST_S if waited < _FAST_FOR_S else _POLL_SLOW_S

    def _enqueue(self, task: MoveT, queued_at: float) -> None:
        ids = task.remote_block_ids
        num_blocks = self._endpoint.region.num_blocks
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
            cause = f"block {int(ids.max())} is named, but the peer has {num_blocks}"
            self._report(MoveResult(task=task, cause=cause))
            return
        if not ids.size:
            self._report(MoveResult(task=task, stats=self._stats(task, queued_at, queued_at, 0)))
            return
        self._waiting[task.transfer] = (task, queued_at)

    def _drop(self, transfer: TransferKey) -> None:
        waiting = self._waiting.pop(transfer, None)
        if waiting is not None:
            self._report(MoveResult(task=waiting[0], cause="cancelled before it began"))

    def _post_next(self) -> None:
        """Post one move. Posting may copy everything, so orders are heard between two of them."""
        if not self._waiting:
            return
        agent = self._connected_agent()
        task, queued_at = next(iter(self._waiting.values()))
        local_ids, remote_ids = merge_order(task.local_block_ids, task.remote_block_ids)
        started_at = self._clock.now()
        if not self._flying:
            self._last_progress = started_at
        handle, is_done = self._post(agent, local_ids, remote_ids)
        del self._waiting[task.transfer]
        flight = _Flight(
            task=task,
            handle=handle,
            queued_at=queued_at,
            started_at=started_at,
            num_descriptors=num_runs(local_ids, remote_ids),
        )
        self._flying[task.transfer] = flight
        if is_done:
            self._finish(agent, flight)

    @abstractmethod
    def _post(
        self,
        agent: TransferAgent,
        local_ids: npt.NDArray[np.int32],
        remote_ids: npt.NDArray[np.int32],
    ) -> tuple[Any, bool]:
        """Start a transfer; return its handle, and whether it is done already."""

    def _connected_agent(self) -> TransferAgent:
        if self._agent is None:
            self._agent = TransferAgent(self._region)
            self._agent.connect(self._endpoint.agent_metadata, self._endpoint.region)
        return self._agent

    def _poll_flying(self) -> None:
        if not self._flying or self._agent is None:
            return
        for flight in tuple(self._flying.values()):
            if self._agent.poll(flight.handle):
                self._finish(self._agent, flight)
            elif self._clock.now() - self._called_at >= _CALL_EVERY_S:
                self._called_at = self._clock.now()
                self._call_peer(flight.task.transfer)
        stalled_s = self._clock.now() - self._last_progress
        if self._flying and stalled_s >= self._stall_timeout_s:
            raise PeerLost(
                f"no data came for {stalled_s:.1f} s (limit {self._stall_timeout_s:g} s)"
            )

    def _finish(self, agent: TransferAgent, flight: _Flight[MoveT]) -> None:
        self._last_progress = self._clock.now()
        self._called_at = -math.inf  # The peer may rest now, so the next move has to call again.
        task = flight.task
        del self._flying[task.transfer]
        stats = self._stats(task, flight.queued_at, flight.started_at, flight.num_descriptors)
        self._report(MoveResult(task=task, stats=stats))
        agent.release(flight.handle)

    def _stats(
        self, task: MoveT, queued_at: float, started_at: float, num_descriptors: int
    ) -> TransferStats:
        num_blocks = task.local_block_ids.size
        return TransferStats(
            transfer=task.transfer,
            peer=self._peer.name,
            num_bytes=num_blocks * self._region.bytes_per_block,
            num_blocks=num_blocks,
            num_descriptors=num_descriptors,
            queued_at=queued_at,
            started_at=started_at,
            ended_at=self._clock.now(),
        )

    def _break(self, cause: str) -> None:
        """End every move: first stop it, then say so."""
        tasks = [flight.task for flight in self._flying.values()]
        tasks += [task for task, _ in self._waiting.values()]
        self._waiting.clear()
        try:
            self._destroy_agent()
        except Exception:
            # Its last reference is gone by now, and with it the agent.
            logger.exception("the agent that moved blocks of %s did not end well", self._peer.name)
        for task in tasks:
            self._report(MoveResult(task=task, cause=f"lost {self._peer.name}: {cause}"))

    def _destroy_agent(self) -> None:
        handles = [flight.handle for flight in self._flying.values()]
        self._flying.clear()
        self._called_at = -math.inf  # The next agent begins with a read that has to call.
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.destroy(handles)

    def _close_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _stop(self) -> None:
        self._closing = True
        if self._flying or self._waiting:
            self._break("this engine is closing")
        self._close_agent()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._peer.name}: {len(self._waiting)} waiting, "
            f"{len(self._flying)} in flight>"
        )
