"""An engine without a model: KV memory of SmolLM2's shape, and both halves of a NIXL connector."""

from __future__ import annotations

import time
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.clock import MonotonicClock
from pdcore.connector.base import FinishedBlocks, KVCaches, KVLoad
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.loop import Waker
from pdcore.messages import NewRequestData, SchedulerOutput, TransferKey
from pdcore.request import FinishReason, Request, SamplingParams

__all__ = ["BLOCK_SIZE", "EMPTY_PLAN", "KVEngine", "KVShape", "expected_words", "prompt_of"]

BLOCK_SIZE = 16
_LIMIT_S = 30.0
_NONE = np.zeros(0, np.int32)
EMPTY_PLAN = SchedulerOutput(
    step_id=0,
    rows=_NONE,
    epochs=_NONE,
    num_scheduled_tokens=_NONE,
    num_computed_tokens=_NONE,
    samples=np.zeros(0, np.bool_),
    block_rows=_NONE,
    block_positions=_NONE,
    block_ids=_NONE,
    finished_rows=_NONE,
)


@attrs.frozen(kw_only=True)
class KVShape:
    """SmolLM2-135M's KV, whose blocks are contiguous.

    Args:
        itemsize: bytes of an element: 4 for fp32, 2 for bf16.
        num_layers, num_kv_heads, head_dim: the model's.
    """

    itemsize: int
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64

    @property
    def bytes_per_piece(self) -> int:
        """One layer's keys, or values, of a block: what a layout by layers keeps together."""
        return BLOCK_SIZE * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def num_pieces(self) -> int:
        return 2 * self.num_layers

    @property
    def bytes_per_block(self) -> int:
        return self.num_pieces * self.bytes_per_piece

    def num_blocks_for(self, num_megabytes: float) -> int:
        """How many blocks have at least so many bytes."""
        return -(-int(num_megabytes * 1e6) // self.bytes_per_block)


def prompt_of(num_blocks: int, first: int = 0) -> npt.NDArray[np.int32]:
    """A prompt that fills some blocks; no two with different first tokens share a block."""
    return np.arange(first, first + num_blocks * BLOCK_SIZE, dtype=np.int32)


def expected_words(block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """What stands at the beginning and at the end of an engine's own blocks."""
    return block_ids.astype(np.uint64) + np.uint64(1_000_000_007)


class KVEngine:
    """KV memory and a connector, driven by whoever has it.

    Args:
        num_blocks, bytes_per_block: the memory; every block begins and ends with its own word.
        config: more settings of the connector.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int, **config: Any) -> None:
        self.buffer = np.zeros((num_blocks, bytes_per_block // 8), np.uint64)
        self.buffer[:] = 1  # every page is there before anything is measured
        self.buffer[:, [0, -1]] = expected_words(np.arange(num_blocks, dtype=np.int32))[:, None]
        connector = NixlConnector(NixlConfig(block_size=BLOCK_SIZE, **config))
        self.scheduler, self.worker = connector.scheduler_side(), connector.worker_side()
        self.worker.register_kv_caches(
            KVCaches(buffer=self.buffer, bytes_per_block=bytes_per_block, fingerprint="smollm2")
        )
        self.clock, self.waker = MonotonicClock(), Waker()
        self.scheduler.start(clock=self.clock, notify=self.waker)
        self.scheduler.set_xfer_handshake_metadata([self.worker.get_handshake_metadata()])
        self._num_requests = 0

    def hand_over(self, block_ids: list[int], first: int = 0) -> dict[str, Any]:
        """A ticket for blocks that are taken to hold `prompt_of` their number."""
        return self._finish(self._begin(block_ids, first), block_ids)

    def prefill(
        self,
        block_ids: list[int],
        *,
        first: int = 0,
        num_steps: int,
        step_s: float,
        push_to: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """`hand_over` after some steps of a device of its own, each of which fills a share of the
        blocks.

        Returns:
            The ticket, and when the last step ended, on the system's monotonic clock.
        """
        request = self._begin(block_ids, first, push_to)
        row = _new_row(request, self._num_requests, block_ids)
        num_tokens = -(-request.num_prompt_tokens // num_steps)
        for start in range(0, request.num_prompt_tokens, num_tokens):
            self.scheduler.take_events()
            end = min(start + num_tokens, request.num_prompt_tokens)
            meta = self.scheduler.build_connector_meta(_a_step(row, start, end))
            self.worker.start_load_kv(meta)
            time.sleep(step_s)
            self.worker.wait_for_save()
            self.scheduler.update_connector_output(self.worker.get_finished())
        ended_at = time.monotonic()
        ticket = self._finish(request, block_ids)
        # The router of a real pair would pass the ticket on meanwhile; this one waits its turn.
        limit = ended_at + _LIMIT_S
        while (pushes := self.scheduler.stats().pushes).num_ended < pushes.num_started:
            if time.monotonic() > limit:
                raise RuntimeError(f"a push did not end within {_LIMIT_S:g} s")
            self._sleep(1.0)
            self.step()
        return {"ticket": ticket, "ended_at": ended_at}

    def _begin(
        self, block_ids: list[int], first: int, push_to: dict[str, Any] | None = None
    ) -> Request:
        params = {"do_remote_decode": True, "push_to": push_to}
        request = self._request(len(block_ids), params, first)
        self._num_requests += 1
        self.scheduler.request_added(request, self._num_requests)
        return request

    def _finish(self, request: Request, block_ids: list[int]) -> dict[str, Any]:
        blocks = FinishedBlocks(
            block_ids=np.array(block_ids, np.int32),
            generations=np.ones(len(block_ids), np.int64),
            num_tokens=request.num_prompt_tokens,
            finish_reason=FinishReason.LENGTH,
        )
        handed = self.scheduler.request_finished(request, self._num_requests, blocks)
        assert handed is not None
        assert handed.kv_transfer_params is not None
        return handed.kv_transfer_params

    def read(
        self, ticket: dict[str, Any], block_ids: npt.NDArray[np.int32], first: int = 0
    ) -> dict[str, float]:
        """Redeem a ticket as an idle engine's loop does; return what it took, in milliseconds.

        Raises:
            RuntimeError: the load failed, or what arrived is not what was there.
        """
        request = self._request(block_ids.size, ticket, first)
        self._num_requests += 1
        uid = self._num_requests
        began_at, cpu_s = self.clock.now(), time.process_time()
        self.scheduler.request_added(request, uid)
        match = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert match is not None
        load = KVLoad(
            transfer=TransferKey(uid, 0),
            request=request,
            num_local_tokens=0,
            num_external_tokens=match.num_tokens,
            block_ids=block_ids,
            deadline=began_at + _LIMIT_S,
        )
        self.scheduler.update_state_after_alloc(request, load)
        self._until_promoted(load.transfer)
        promoted_at = self.clock.now()
        self.scheduler.request_finished(request, uid, _no_blocks())
        ended_at, cpu_s = self.clock.now(), time.process_time() - cpu_s
        stats = self.scheduler.stats().transfers[-1]
        accept_s = stats.accept_s or 0.0
        self._check(ticket, block_ids)
        return {
            "ms": 1e3 * (stats.ended_at - stats.queued_at),
            "queue": 1e3 * stats.queue_s,
            "wire": 1e3 * stats.wire_s,
            "accept": 1e3 * accept_s,
            "promotion": 1e3 * (promoted_at - stats.ended_at),
            "request": 1e3 * (ended_at - began_at),
            "protocol": 1e3 * (ended_at - began_at - stats.wire_s),
            "cpu": 1e3 * cpu_s,
            "pieces": stats.num_descriptors,
            "num_bytes": stats.num_bytes,
        }

    def step(self) -> tuple[TransferKey, ...]:
        """One step of a loop that has nothing to compute; returns what may be used from now on."""
        events = self.scheduler.take_events()
        if events.failed:
            raise RuntimeError(events.failed[0].cause)
        meta = self.scheduler.build_connector_meta(EMPTY_PLAN)
        if meta is not None:
            self.worker.start_load_kv(meta)
            self.worker.wait_for_save()
            self.scheduler.update_connector_output(self.worker.get_finished())
        return events.finished_recving

    def rest(self, seconds: float) -> float:
        """Idle as an engine's loop does; return the share of one core that the process used."""
        began_s, began_at = time.process_time(), time.monotonic()
        while (now := time.monotonic()) < began_at + seconds:
            self._sleep(began_at + seconds - now)
            self.step()
        return (time.process_time() - began_s) / (time.monotonic() - began_at)

    def close(self) -> None:
        """Stop all threads."""
        self.worker.close()
        self.scheduler.close()

    def _until_promoted(self, transfer: TransferKey) -> None:
        limit = time.monotonic() + _LIMIT_S
        while transfer not in self.step():
            if time.monotonic() > limit:
                raise RuntimeError(f"a load did not end within {_LIMIT_S:g} s")
            self._sleep(1.0)

    def _sleep(self, timeout_s: float) -> None:
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None:
            timeout_s = min(timeout_s, wakeup - self.clock.now())
        if timeout_s > 0:
            self.waker.wait(timeout_s)

    def _request(self, num_blocks: int, params: dict[str, Any], first: int = 0) -> Request:
        return Request(
            f"r{self._num_requests}",
            prompt_of(num_blocks, first),
            sampling=SamplingParams(max_tokens=1),
            kv_transfer_params=params,
        )

    def _check(self, ticket: dict[str, Any], block_ids: npt.NDArray[np.int32]) -> None:
        ends = self.buffer[block_ids[:, None], [0, -1]]
        if not (ends == expected_words(np.array(ticket["block_ids"]))[:, None]).all():
            raise RuntimeError("the blocks that arrived are not those of the ticket")
        self.buffer[block_ids, 0] = self.buffer[block_ids, -1] = 0


def _new_row(request: Request, uid: int, block_ids: list[int]) -> NewRequestData:
    return NewRequestData(
        row=0,
        epoch=uid,
        uid=uid,
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=0,
        block_ids=np.array(block_ids, np.int32),
        sampling=request.sampling,
    )


def _a_step(row: NewRequestData, start: int, end: int) -> SchedulerOutput:
    """A plan that computes some of a prompt, in row 0."""
    return attrs.evolve(
        EMPTY_PLAN,
        rows=np.zeros(1, np.int32),
        epochs=np.full(1, row.epoch, np.int32),
        num_scheduled_tokens=np.full(1, end - start, np.int32),
        num_computed_tokens=np.full(1, start, np.int32),
        samples=np.full(1, end == row.num_prompt_tokens),
        scheduled_new_reqs=() if start else (row,),
    )


def _no_blocks() -> FinishedBlocks:
    return FinishedBlocks(
        block_ids=_NONE,
        generations=np.zeros(0, np.int64),
        num_tokens=0,
        finish_reason=FinishReason.ABORT,
    )
