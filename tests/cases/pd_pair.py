"""Prefill and decode engines on one fabric and one clock, and connectors that a test commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Engine, some_tokens

from pdcore.clock import VirtualClock
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVConnector,
    KVLoad,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.loopback.faults import FaultPlan
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.messages import LoadFailure, TransferKey
from pdcore.request import Request
from pdcore.scheduler import RequestHandle

__all__ = [
    "BLOCK_SIZE",
    "HAND_OVER",
    "LEASE_S",
    "Counting",
    "Pair",
    "Scripted",
    "ScriptedConnector",
    "only",
    "prompt_of",
]

BLOCK_SIZE = 16
LEASE_S = 30.0
HAND_OVER = {"do_remote_decode": True}

Tokens = Sequence[int] | npt.NDArray[np.int32]

# A fault that makes a pair spin must fail its test, not hang it.
_MAX_TURNS = 5000


def prompt_of(num_blocks: int, *, more: int = 0, seed: int = 0) -> np.ndarray:
    """A prompt that fills so many blocks, and ``more`` tokens of the next."""
    return some_tokens(num_blocks * BLOCK_SIZE + more, seed=seed)


def only(name: str, faults: LoopbackFaults) -> Callable[[KVLoad], LoopbackFaults]:
    """Faults for the loads of one request."""
    return lambda load: faults if load.request.request_id == name else LoopbackFaults()


class Counting(KVConnector):
    """A connector that counts the calls to its scheduler half by method and request id."""

    def __init__(self, inner: KVConnector) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._inner = inner

    def scheduler_side(self) -> SchedulerConnector:
        side = self._inner.scheduler_side()
        for name in ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"):
            setattr(side, name, self._counted(name, getattr(side, name)))
        return side

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self._inner.worker_side(rank)

    def _counted(self, name: str, method: Any) -> Any:
        def counted(request: Request, *args: Any) -> Any:
            self.calls[name, request.request_id] += 1
            return method(request, *args)

        return counted


class Pair:
    """Two real engines. Requests go through ``prefill`` first; the clock moves when both wait.

    Args:
        faults: of the wire.
        lease_s: how long a hand-over is kept without a renewal.
        wrap: what stands between each engine and its loopback connector.
        prefill, decode: options of each engine.
        options: of both.
    """

    def __init__(
        self,
        *,
        faults: LoopbackFaults | FaultPlan | None = None,
        lease_s: float = LEASE_S,
        wrap: Callable[[LoopbackConnector], KVConnector] = lambda connector: connector,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.fabric = LoopbackFabric(clock=self.clock, faults=faults)
        self.connectors: dict[str, Counting] = {}
        self._lease_s = lease_s
        self._wrap = wrap
        self.prefill = self.join("prefill", **{**options, **(prefill or {})})
        self.decode = self.join("decode", **{**options, **(decode or {})})

    def join(self, name: str, **options: Any) -> Engine:
        """One more engine on the fabric."""
        loopback = LoopbackConnector(
            self.fabric, engine_id=name, block_size=BLOCK_SIZE, lease_s=self._lease_s
        )
        connector = self.connectors[name] = Counting(self._wrap(loopback))
        return Engine(connector=connector, clock=self.clock, block_size=BLOCK_SIZE, **options)

    def hand_over(self, name: str, prompt: Tokens, **options: Any) -> dict[str, Any]:
        """Compute a prompt on the prefill engine; return what it hands over."""
        self.prefill.add(
            name, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **options
        )
        while not self.prefill.ends[name]:
            self.prefill.step()
        params = self.prefill.end(name).kv_transfer_params
        assert params is not None
        return params

    def send(self, name: str, prompt: Tokens, **options: Any) -> RequestHandle:
        """Compute a prompt on the prefill engine and add its request to the decode engine."""
        params = self.hand_over(name, prompt)
        return self.decode.add(name, prompt, kv_transfer_params=params, **options)

    def run(self, *engines: Engine) -> int:
        """Step engines (both, if none is named) in turn until none has anything left to do.

        Returns:
            How many turns that took.
        """
        engines = engines or (self.prefill, self.decode)
        for num_turns in range(1, _MAX_TURNS):
            num_busy = sum(self.turn(engine) for engine in engines)
            if not any(engine.scheduler.has_requests() for engine in engines):
                return num_turns
            if not num_busy:
                self.sleep(*engines)
        raise AssertionError(f"no end: {[engine.scheduler for engine in engines]}")

    def turn(self, engine: Engine) -> bool:
        """One plan and its result; return whether it computed anything."""
        planned = engine.dispatch()
        engine.land()
        return bool(planned)

    def sleep(self, *engines: Engine) -> None:
        """Let time pass until one of the engines wants to be woken."""
        if any(engine.scheduler.has_work() for engine in engines):
            return
        wakeups = [engine.scheduler.next_wakeup() for engine in engines]
        times = [time for time in wakeups if time is not None]
        assert times, f"nobody will ever wake up: {[engine.scheduler for engine in engines]}"
        self.clock.advance(max(min(times) - self.clock.now(), 0.0))

    def assert_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.assert_idle()


class Scripted(NullSchedulerConnector):
    """Brings whole prompts, hands over every end, and reports what and when a test says.

    Attributes:
        loads: all that were started, by request id.
        cancelled, cut_off_loads: which of them the scheduler asked to end.
        events: what the next `take_events` returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loads: dict[str, KVLoad] = {}
        self.cancelled: list[TransferKey] = []
        self.cut_off_loads: list[TransferKey] = []
        self.events = ConnectorEvents()

    def recognizes(self, params: Mapping[str, Any]) -> bool:
        return True

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        if request.kv_transfer_params is None:
            return ExternalMatch(num_tokens=0)
        num_tokens = max(request.num_prompt_tokens - 1 - num_local_tokens, 0)
        return ExternalMatch(num_tokens=num_tokens, is_async=True)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self.loads[request.request_id] = load

    def request_finished(self, request: Request, uid: int, blocks: FinishedBlocks) -> HandOver:
        return HandOver(transfer_id=f"send-{request.request_id}")

    def cancel(self, transfer: TransferKey) -> None:
        self.cancelled.append(transfer)

    def cut_off(self, transfer: TransferKey) -> None:
        self.cut_off_loads.append(transfer)

    def take_events(self) -> ConnectorEvents:
        events, self.events = self.events, ConnectorEvents()
        return events

    def next_wakeup(self) -> float | None:
        return None

    def report(
        self,
        *,
        sent: Sequence[str] = (),
        received: Sequence[TransferKey] = (),
        failed: Sequence[TransferKey] = (),
    ) -> None:
        """What the scheduler hears with its next plan."""
        self.events = ConnectorEvents(
            finished_sending=tuple(sent),
            finished_recving=tuple(received),
            failed=tuple(
                LoadFailure(transfer=key, num_valid_tokens=0, cause="scripted") for key in failed
            ),
        )


class ScriptedConnector(KVConnector):
    """The factory of a `Scripted`, which is made beforehand, and of a worker that does nothing."""

    def __init__(self) -> None:
        self.side = Scripted()

    def scheduler_side(self) -> Scripted:
        return self.side

    def worker_side(self, rank: int = 0) -> NullWorkerConnector:
        return NullWorkerConnector()
