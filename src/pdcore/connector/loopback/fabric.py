"""The wire between loopback engines: who is alive, whose memory is where, and the tickets."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

import attrs

from pdcore.clock import Clock, MonotonicClock
from pdcore.connector.base import KVCaches, KVLoad
from pdcore.connector.block_count import BlockCount
from pdcore.connector.loopback.faults import FaultPlan, LoopbackFaults
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.tickets import TicketAnswer, TicketRegistry
from pdcore.errors import ConfigError, PeerLost
from pdcore.messages import TransferKey

__all__ = ["LoopbackEngine", "LoopbackFabric"]


@attrs.define(eq=False, kw_only=True)
class LoopbackEngine:
    """One life of one engine on the fabric.

    Args:
        engine_id: its name.
        epoch: which life this is.
        registry: its hand-overs.
        caches: its KV memory, once its worker registered it.
        block_count: of that, and of its scheduler's pool.
        notify: wakes its loop.
        due_times: of its loads in flight: when each is due on the clock; None when only polls (or
            nothing at all) will end it.
    """

    engine_id: str
    epoch: int
    registry: TicketRegistry
    caches: KVCaches | None = None
    block_count: BlockCount = attrs.field(factory=BlockCount)
    is_alive: bool = True
    notify: Callable[[], None] = attrs.field(default=lambda: None)
    due_times: dict[TransferKey, float | None] = attrs.field(factory=dict)


class LoopbackFabric:
    """Joins the engines of one process. Make one, and a `LoopbackConnector` on it for each engine.

    Safe to use from any thread.

    Args:
        clock: the clock of leases and delays; give the schedulers the same one.
        faults: what happens to every load, or a function that chooses for each. May be replaced at
            any time; loads that have started keep theirs.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        faults: LoopbackFaults | FaultPlan | None = None,
    ) -> None:
        self.clock = clock or MonotonicClock()
        self.faults = faults or LoopbackFaults()
        self._lock = threading.Lock()
        self._engines: dict[str, LoopbackEngine] = {}

    def join(self, engine_id: str) -> LoopbackEngine:
        """Begin a life of an engine. If it had one before, that one is over: its peers' loads fail
        and its tickets are refused."""
        with self._lock:
            before = self._engines.get(engine_id)
            engine = LoopbackEngine(
                engine_id=engine_id,
                epoch=0 if before is None else before.epoch + 1,
                registry=TicketRegistry(self.clock),
            )
            self._engines[engine_id] = engine
            return engine

    def knows(self, engine_id: str) -> bool:
        """Whether an engine of this name ever joined."""
        with self._lock:
            return engine_id in self._engines

    def kill(self, engine_id: str) -> None:
        """End an engine's life as its peers see it. Its memory may still be written to."""
        with self._lock:
            self._engines[engine_id].is_alive = False

    def restart(self, engine_id: str) -> None:
        """Let an engine lose its record of hand-overs, as a restarted process does, and go on; one
        that was killed lives again.

        Its peers' loads fail, old tickets are refused, and its holds are let go.
        """
        with self._lock:
            engine = self._engines[engine_id]
            engine.epoch += 1
            engine.is_alive = True
        engine.registry.expire(math.inf)
        engine.notify()

    def peer(self, ticket: LoopbackTicket) -> LoopbackEngine:
        """The engine that gave out a ticket.

        Raises:
            PeerLost: it is dead, restarted, or was never there.
        """
        with self._lock:
            engine = self._engines.get(ticket.engine_id)
            if engine is None or not engine.is_alive:
                raise PeerLost(f"engine {ticket.engine_id!r} is gone")
            if engine.epoch != ticket.engine_epoch:
                raise PeerLost(
                    f"engine {ticket.engine_id!r} restarted: the ticket is from its life "
                    f"{ticket.engine_epoch}, this is life {engine.epoch}"
                )
            return engine

    def renew(self, ticket: LoopbackTicket) -> TicketAnswer:
        """Start a ticket's lease afresh. A no is final."""
        try:
            return self.peer(ticket).registry.renew(ticket.transfer_id)
        except PeerLost as error:
            return TicketAnswer(False, reason=str(error))

    def accept(self, ticket: LoopbackTicket, *, consumer: str) -> TicketAnswer:
        """Ask the peer to vouch for what was read. The ticket ends with a yes."""
        try:
            peer = self.peer(ticket)
        except PeerLost as error:
            return TicketAnswer(False, reason=str(error))
        digest = ticket.contents.digest()
        answer = peer.registry.accept(ticket.transfer_id, digest, consumer=consumer)
        peer.notify()
        return answer

    def release(self, ticket: LoopbackTicket) -> bool:
        """Tell the peer that nobody will read; return whether the ticket was open."""
        try:
            peer = self.peer(ticket)
        except PeerLost:
            return False
        was_open = peer.registry.release(ticket.transfer_id)
        peer.notify()
        return was_open

    def choose_faults(self, load: KVLoad) -> LoopbackFaults:
        """The faults of a load that starts now.

        Raises:
            ConfigError: what is to choose them returned something else.
        """
        faults = self.faults
        chosen = faults if isinstance(faults, LoopbackFaults) else faults(load)
        if not isinstance(chosen, LoopbackFaults):
            raise ConfigError(
                f"the faults function returned {chosen!r:.80} for request "
                f"{load.request.request_id!r}: return LoopbackFaults()"
            )
        return chosen

    def set_due(self, engine: LoopbackEngine, transfer: TransferKey, due: float | None) -> None:
        """Note when a load of an engine is due."""
        with self._lock:
            engine.due_times[transfer] = due

    def clear_due(self, engine: LoopbackEngine, transfer: TransferKey) -> None:
        """Forget a load that ended."""
        with self._lock:
            engine.due_times.pop(transfer, None)

    def next_due(self, engine: LoopbackEngine, transfers: Iterable[TransferKey]) -> float | None:
        """When the next of an engine's loads is due that it still waits for, or None."""
        with self._lock:
            dues = [engine.due_times.get(transfer) for transfer in transfers]
        return min((due for due in dues if due is not None), default=None)
