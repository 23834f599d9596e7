"""Engines without a model: both halves of a connector over a numpy buffer of known content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pdcore.clock import MonotonicClock
from pdcore.connector.base import FinishedBlocks, KVCaches, KVLoad, SchedulerConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.messages import LoadFailure, SchedulerOutput, TransferKey
from pdcore.request import FinishReason, Request, SamplingParams

BLOCK_SIZE = 4
WORDS_PER_BLOCK = 512
NUM_BLOCKS = 64
_EMPTY = np.zeros(0, dtype=np.int32)


def a_request(
    prompt: list[int], params: dict[str, Any] | None = None, request_id: str = "r"
) -> Request:
    """A request for one token."""
    return Request(
        request_id, prompt, sampling=SamplingParams(max_tokens=1), kv_transfer_params=params
    )


def an_empty_plan() -> SchedulerOutput:
    """A plan without rows."""
    return SchedulerOutput(
        step_id=0,
        rows=_EMPTY,
        epochs=_EMPTY,
        num_scheduled_tokens=_EMPTY,
        num_computed_tokens=_EMPTY,
        samples=np.zeros(0, dtype=np.bool_),
        block_rows=_EMPTY,
        block_positions=_EMPTY,
        block_ids=_EMPTY,
        finished_rows=_EMPTY,
    )


LIMIT_S = 60.0
"""How long a test waits for what must come. A machine on which others compete for every core takes
ten times as long as an idle one, and waiting costs nothing where all is well."""


def until(condition: Callable[[], Any], *, limit_s: float = LIMIT_S, what: str = "") -> Any:
    """Poll until a condition gives something; fail after the limit."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {what or condition}")
        time.sleep(0.002)
    return value


def begin_load(
    scheduler: SchedulerConnector,
    request: Request,
    transfer: TransferKey,
    block_ids: list[int],
    *,
    num_local: int,
) -> KVLoad:
    """Ask for a request's match and start its load into the blocks after its local ones."""
    match = scheduler.get_num_new_matched_tokens(request, num_local)
    assert match is not None
    assert match.num_tokens > 0
    load = KVLoad(
        transfer=transfer,
        request=request,
        num_local_tokens=num_local,
        num_external_tokens=match.num_tokens,
        block_ids=np.array(block_ids, dtype=np.int32),
        deadline=time.monotonic() + 60,
    )
    scheduler.update_state_after_alloc(request, load)
    return load


class Engine:
    """One connector, both halves, and a loop that steps without a model."""

    def __init__(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        words: int = WORDS_PER_BLOCK,
        content: bool = False,
        fingerprint: str = "model/float32",
        **config: Any,
    ) -> None:
        self.buffer = np.zeros((num_blocks, words), dtype=np.uint64)
        if content:
            self.buffer[:] = np.arange(self.buffer.size, dtype=np.uint64).reshape(num_blocks, words)
        connector = NixlConnector(NixlConfig(**{"block_size": BLOCK_SIZE} | config))
        self.scheduler = connector.scheduler_side()
        self.worker = connector.worker_side()
        self.num_notices = 0
        self._woken = threading.Event()
        self.worker.register_kv_caches(
            KVCaches(buffer=self.buffer, bytes_per_block=8 * words, fingerprint=fingerprint)
        )
        self.scheduler.start(clock=MonotonicClock(), notify=self._count)
        self.scheduler.set_xfer_handshake_metadata([self.worker.get_handshake_metadata()])
        self.sent: list[str] = []
        self.received: list[TransferKey] = []
        self.failed: list[LoadFailure] = []
        self._next_uid = 0

    def _count(self) -> None:
        self.num_notices += 1
        self._woken.set()

    def prefill(self, prompt: list[int], block_ids: list[int]) -> dict[str, Any]:
        """Pretend to have computed a prompt into blocks, and hand it over."""
        request = a_request(prompt, {"do_remote_decode": True})
        uid = self.add(request)
        return self.finish(request, uid, block_ids, num_tokens=len(prompt))

    def add(self, request: Request) -> int:
        self._next_uid += 1
        self.scheduler.request_added(request, self._next_uid)
        return self._next_uid

    def finish(
        self,
        request: Request,
        uid: int,
        block_ids: list[int],
        *,
        num_tokens: int = 0,
        reason: FinishReason = FinishReason.LENGTH,
    ) -> Any:
        blocks = FinishedBlocks(
            block_ids=np.array(block_ids, dtype=np.int32),
            generations=np.arange(len(block_ids), dtype=np.int64),
            num_tokens=num_tokens,
            finish_reason=reason,
        )
        hand_over = self.scheduler.request_finished(request, uid, blocks)
        return None if hand_over is None else hand_over.kv_transfer_params

    def load(
        self,
        request: Request,
        uid: int,
        block_ids: list[int],
        *,
        num_local: int = 0,
        attempt: int = 0,
    ) -> KVLoad:
        """Admit a request: ask for its match and start the load."""
        transfer = TransferKey(uid, attempt)
        return begin_load(self.scheduler, request, transfer, block_ids, num_local=num_local)

    def step(self) -> None:
        """One step of an engine loop, without tokens."""
        events = self.scheduler.take_events()
        self.sent += events.finished_sending
        self.received += events.finished_recving
        self.failed += events.failed
        meta = self.scheduler.build_connector_meta(an_empty_plan())
        if meta is not None:
            self.worker.start_load_kv(meta)
            self.scheduler.update_connector_output(self.worker.get_finished())

    def step_until(self, condition: Callable[[], Any], *, limit_s: float = LIMIT_S) -> Any:
        """Step until a condition gives something."""

        def stepped() -> Any:
            self.step()
            return condition()

        return until(stepped, limit_s=limit_s)

    def rest(self, seconds: float) -> float:
        """Run as an idle engine does, asleep until something happens; return CPU seconds used."""
        began_s, end = time.process_time(), time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            wakeup = self.scheduler.next_wakeup()
            self._woken.wait(min(end, end if wakeup is None else wakeup) - now)
            self._woken.clear()
            self.step()
        return time.process_time() - began_s

    def clear(self) -> None:
        """Forget what was received and failed, and blank the buffer."""
        self.received.clear()
        self.failed.clear()
        self.buffer[:] = 0

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
