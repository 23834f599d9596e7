"""Scheduler halves without workers: the test plays the workers and the clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from nixl_engines import BLOCK_SIZE, an_empty_plan, until

from pdcore.clock import Clock, MonotonicClock
from pdcore.connector.base import FinishedBlocks, HandOver, KVLoad
from pdcore.connector.nixl import NixlConfig, NixlConnector, WorkerHandshake
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import Doorbell, NixlMeta, RankEndpoint
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.request import FinishReason, Request, SamplingParams

PROMPT = list(range(14))


def a_handshake(fingerprint: str = "model", bytes_per_block: int = 64) -> WorkerHandshake:
    """What a worker would say of itself, had it any memory."""
    region = MemoryRegion(address=4096, num_blocks=32, bytes_per_block=bytes_per_block)
    return WorkerHandshake(
        endpoint=RankEndpoint(agent_metadata=b"none", region=region, fingerprint=fingerprint),
        doorbell=Doorbell(host="127.0.0.1", port=9, token=bytes(16)),
    )


class Half:
    """A scheduler half, and shorthands for what a scheduler does with it."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        handshakes: list[WorkerHandshake] | None = None,
        **config: Any,
    ) -> None:
        connector = NixlConnector(NixlConfig(**{"block_size": BLOCK_SIZE} | config))
        self.connector = connector.scheduler_side()
        self.num_notices = 0
        self.connector.start(clock=clock or MonotonicClock(), notify=self._count)
        if handshakes != []:
            self.connector.set_xfer_handshake_metadata(handshakes or [a_handshake()])
        self._next_uid = 0
        self.sent: list[str] = []
        self.received: list[TransferKey] = []
        self.failed: list[LoadFailure] = []

    def _count(self) -> None:
        self.num_notices += 1

    def hand_over(
        self,
        prompt: list[int] = PROMPT,
        *,
        num_tokens: int | None = None,
        reason: FinishReason = FinishReason.LENGTH,
    ) -> HandOver | None:
        """Let a prefill end."""
        request = Request(
            "p",
            prompt,
            sampling=SamplingParams(max_tokens=1),
            kv_transfer_params={"do_remote_decode": True},
        )
        uid = self.add(request)
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        blocks = FinishedBlocks(
            block_ids=np.arange(10, 10 + num_blocks, dtype=np.int32),
            generations=np.ones(num_blocks, dtype=np.int64),
            num_tokens=len(prompt) if num_tokens is None else num_tokens,
            finish_reason=reason,
        )
        return self.connector.request_finished(request, uid, blocks)

    def ticket(self, prompt: list[int] = PROMPT) -> dict[str, Any]:
        """Let a prefill end with a ticket."""
        hand_over = self.hand_over(prompt)
        assert hand_over is not None
        assert hand_over.kv_transfer_params is not None
        return hand_over.kv_transfer_params

    def add(self, request: Request) -> int:
        """A request arrives; returns its uid."""
        self._next_uid += 1
        self.connector.request_added(request, self._next_uid)
        return self._next_uid

    def match(self, request: Request, num_local: int = 0) -> int:
        """How many tokens the connector offers."""
        match = self.connector.get_num_new_matched_tokens(request, num_local)
        assert match is not None
        return match.num_tokens

    def load(self, request: Request, uid: int, *, num_local: int = 0, attempt: int = 0) -> KVLoad:
        """Admit a request whose ticket brings something."""
        num_tokens = self.match(request, num_local)
        num_blocks = -(-(num_local + num_tokens) // BLOCK_SIZE) - num_local // BLOCK_SIZE
        load = KVLoad(
            transfer=TransferKey(uid, attempt),
            request=request,
            num_local_tokens=num_local,
            num_external_tokens=num_tokens,
            block_ids=np.arange(1, 1 + num_blocks, dtype=np.int32),
            deadline=0.0,
        )
        self.connector.update_state_after_alloc(request, load)
        return load

    def plan(self) -> NixlMeta | None:
        """Take events in and make a plan."""
        self.take_events()
        return self.connector.build_connector_meta(an_empty_plan())

    def plan_with_read(self) -> NixlMeta:
        """Plan until a plan carries a read."""
        metas: list[NixlMeta] = []

        def has_read() -> bool:
            meta = self.plan()
            if meta is not None and meta.reads:
                metas.append(meta)
            return bool(metas)

        until(has_read)
        return metas[0]

    def take_events(self) -> None:
        """Take events in."""
        events = self.connector.take_events()
        self.sent += events.finished_sending
        self.received += events.finished_recving
        self.failed += events.failed

    def workers_say(self, *, finished: KVLoad | None = None, failed: KVLoad | None = None) -> None:
        """Bring a worker's report."""
        failures = ()
        if failed is not None:
            failures = (
                LoadFailure(
                    transfer=failed.transfer,
                    num_valid_tokens=failed.num_local_tokens,
                    cause="the wire broke",
                ),
            )
        self.connector.update_connector_output(
            TransferReport(
                finished_recving=() if finished is None else (finished.transfer,), failed=failures
            )
        )

    def end(self, request: Request, uid: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """The request ends."""
        blocks = FinishedBlocks(
            block_ids=np.zeros(0, dtype=np.int32),
            generations=np.zeros(0, dtype=np.int64),
            num_tokens=0,
            finish_reason=reason,
        )
        self.connector.request_finished(request, uid, blocks)

    def until_event(self) -> None:
        """Take events in until a load ended."""

        def has_event() -> bool:
            self.take_events()
            return bool(self.received or self.failed)

        until(has_event)


@contextmanager
def half(**options: Any) -> Iterator[Half]:
    """A scheduler half for the length of a block."""
    made = Half(**options)
    try:
        yield made
    finally:
        made.connector.close()


def decode_request(params: dict[str, Any], prompt: list[int] = PROMPT) -> Request:
    """A request that brings a ticket."""
    return Request("d", prompt, kv_transfer_params=params)


def sent_by(prefill: Half) -> list[str]:
    """What the prefill engine was told may go, so far."""
    prefill.take_events()
    return prefill.sent
