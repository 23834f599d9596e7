"""Engines of unequal shapes, over real NIXL: several agents of one process stand for the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from nixl_engines import a_request, an_empty_plan, begin_load, until
from nixl_shapes import a_layout, a_prompt, laid_out

from pdcore.clock import MonotonicClock
from pdcore.connector.base import FinishedBlocks, KVCaches, KVLoad
from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.errors import ConfigError
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.request import FinishReason
from pdcore.runner.executor import TransferReportMerger

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

NUM_BLOCKS = 64


class ShapedEngine:
    """One scheduler half and one worker half for each rank, without a model."""

    def __init__(self, tp_size: int, block_size: int, changes: Any = None, **config: Any) -> None:
        self.layouts = [
            a_layout(block_size, rank, tp_size, **(changes or {})) for rank in range(tp_size)
        ]
        self.block_size = block_size
        connector = NixlConnector(NixlConfig(block_size=block_size, **config))
        self.scheduler = connector.scheduler_side()
        self.workers = [connector.worker_side(rank) for rank in range(tp_size)]
        self.caches = [_memory(layout) for layout in self.layouts]
        for worker, cache, layout in zip(self.workers, self.caches, self.layouts, strict=True):
            worker.register_kv_caches(_kv_caches(cache, layout))
        self.scheduler.start(clock=MonotonicClock(), notify=lambda: None)
        self.scheduler.set_xfer_handshake_metadata(
            [worker.get_handshake_metadata() for worker in self.workers]
        )
        self.merger = TransferReportMerger(tp_size)
        self.silent_ranks: set[int] = set()
        self._unsaid: dict[int, list[TransferReport]] = {}
        self.received: list[TransferKey] = []
        self.failed: list[LoadFailure] = []
        self._uid = 0

    def prefill(
        self, kv: npt.NDArray[np.float32], block_ids: list[int], prompt: list[int]
    ) -> dict[str, Any]:
        """Put a prompt's KV into blocks, and hand it over."""
        ids = np.array(block_ids, dtype=np.int32)
        for cache, layout in zip(self.caches, self.layouts, strict=True):
            blocks = laid_out(kv, layout, ids, num_blocks=NUM_BLOCKS)
            cache[ids] = blocks[ids]
        request = a_request(prompt, {"do_remote_decode": True})
        self._uid += 1
        self.scheduler.request_added(request, self._uid)
        hand_over = self.scheduler.request_finished(
            request,
            self._uid,
            FinishedBlocks(
                block_ids=ids,
                generations=np.arange(ids.size, dtype=np.int64),
                num_tokens=len(prompt),
                finish_reason=FinishReason.LENGTH,
            ),
        )
        assert hand_over is not None
        assert hand_over.kv_transfer_params is not None
        return hand_over.kv_transfer_params

    def load(
        self, prompt: list[int], ticket: dict[str, Any], block_ids: list[int], num_local: int
    ) -> KVLoad:
        """Admit a request with a ticket. ``block_ids`` are those after its local blocks."""
        request = a_request(prompt, ticket)
        self._uid += 1
        self.scheduler.request_added(request, self._uid)
        transfer = TransferKey(self._uid, 0)
        return begin_load(self.scheduler, request, transfer, block_ids, num_local=num_local)

    def step(self) -> None:
        """One step without tokens. What a silent rank has to say waits until it is heard."""
        events = self.scheduler.take_events()
        self.received += events.finished_recving
        self.failed += events.failed
        meta = self.scheduler.build_connector_meta(an_empty_plan())
        if meta is None:
            return
        reports: list[TransferReport | None] = []
        for rank, worker in enumerate(self.workers):
            worker.start_load_kv(meta)
            unsaid = self._unsaid.setdefault(rank, [])
            if report := worker.get_finished():
                unsaid.append(report)
            may_speak = bool(unsaid) and rank not in self.silent_ranks
            reports.append(unsaid.pop(0) if may_speak else None)
        self.scheduler.update_connector_output(self.merger.merge(reports))

    def step_until(self, condition: Any) -> None:
        """Step until a condition holds."""

        def stepped() -> Any:
            self.step()
            return condition()

        until(stepped)

    def has_unsaid(self, rank: int) -> bool:
        """Whether a rank has something to say that was not heard yet."""
        return bool(self._unsaid.get(rank))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def _memory(layout: KVLayout) -> npt.NDArray[np.float32]:
    shape = (NUM_BLOCKS, layout.bytes_per_block // 4)
    return np.zeros(shape, dtype=np.float32).reshape(
        NUM_BLOCKS, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim
    )


def _kv_caches(cache: npt.NDArray[np.float32], layout: KVLayout) -> KVCaches:
    return KVCaches(
        buffer=cache,
        bytes_per_block=layout.bytes_per_block,
        fingerprint=f"{layout}".replace(f"tp_rank={layout.tp_rank}", ""),
        layout=layout,
    )


@contextmanager
def a_pair(
    p: tuple[int, int], d: tuple[int, int], changes: Any = None, **config: Any
) -> Iterator[tuple[ShapedEngine, ShapedEngine]]:
    """A prefill and a decode engine, each given as (TP size, block size)."""
    with ExitStack() as stack:
        prefill = stack.enter_context(closing(ShapedEngine(*p)))
        decode = stack.enter_context(closing(ShapedEngine(*d, changes, **config)))
        yield prefill, decode


def some_blocks(num_tokens: int, block_size: int, seed: int) -> list[int]:
    """Scattered blocks for so many tokens."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS))
    return [int(i) for i in ids[: -(-num_tokens // block_size)]]


def assert_held(engine: ShapedEngine, kv: npt.NDArray[np.float32], block_ids: list[int]) -> None:
    """Every rank has this KV in these blocks, and nothing in any other or after the tail."""
    ids = np.array(block_ids, dtype=np.int32)
    for cache, layout in zip(engine.caches, engine.layouts, strict=True):
        np.testing.assert_array_equal(cache, laid_out(kv, layout, ids, num_blocks=NUM_BLOCKS))


SHAPES = [
    pytest.param((2, 16), (1, 32), id="P-TP2-BS16-D-TP1-BS32"),
    pytest.param((1, 32), (2, 16), id="P-TP1-BS32-D-TP2-BS16"),
    pytest.param((2, 16), (1, 16), id="P-TP2-D-TP1"),
    pytest.param((1, 16), (1, 32), id="P-BS16-D-BS32"),
    pytest.param((1, 32), (4, 8), id="P-TP1-BS32-D-TP4-BS8"),
]


@pytest.mark.parametrize("num_tokens", [96, 77])
@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_kv_arrives_whatever_the_shapes(
    p: tuple[int, int], d: tuple[int, int], num_tokens: int
) -> None:
    """Each rank has its heads of each token but the last, also where the last block is not full."""
    prompt, kv = list(range(num_tokens)), a_prompt(num_tokens)
    with a_pair(p, d) as (prefill, decode):
        ticket = prefill.prefill(kv, some_blocks(num_tokens, p[1], 1), prompt)
        local = some_blocks(num_tokens, d[1], 2)
        decode.load(prompt, ticket, local, 0)
        decode.step_until(lambda: decode.received or decode.failed)
        assert decode.failed == []
        assert len(decode.received) == 1
        assert_held(decode, kv[:-1], local)


def test_a_local_hit_may_end_in_the_middle_of_a_peers_block() -> None:
    """With 48 tokens here and blocks of 32 there, the others come and those 48 are let be."""
    prompt, kv = list(range(77)), a_prompt(77)
    with a_pair((1, 32), (2, 16)) as (prefill, decode):
        ticket = prefill.prefill(kv, some_blocks(77, 32, 1), prompt)
        local = some_blocks(77, 16, 2)
        decode.load(prompt, ticket, local[3:], 48)
        decode.step_until(lambda: decode.received or decode.failed)
        assert decode.failed == []
        wanted = kv[:-1].copy()
        wanted[:48] = 0.0
        assert_held(decode, wanted, local)


def test_loads_larger_than_the_staging_area_come_in_pieces() -> None:
    """With room for two blocks, three loads of five blocks each are complete."""
    prompt, kv = list(range(77)), a_prompt(77)
    room = 2 * 2 * a_layout(16, 0, 2).bytes_per_block
    with a_pair((2, 16), (1, 32), max_staging_bytes=room) as (prefill, decode):
        all_blocks = some_blocks(9 * 32, 32, 2)
        for index in range(3):
            ticket = prefill.prefill(kv, some_blocks(77, 16, 1), prompt)
            decode.load(prompt, ticket, all_blocks[3 * index : 3 * index + 3], 0)
        decode.step_until(lambda: len(decode.received) + len(decode.failed) == 3)
        assert decode.failed == []
        (layout,) = decode.layouts
        for index in range(3):
            ids = np.array(all_blocks[3 * index : 3 * index + 3], dtype=np.int32)
            expected = laid_out(kv[:-1], layout, ids, num_blocks=NUM_BLOCKS)
            np.testing.assert_array_equal(decode.caches[0][ids], expected[ids])


def test_a_load_is_reported_with_its_last_rank() -> None:
    """Three ranks report, one is silent: nothing is told until it has spoken."""
    prompt, kv = list(range(64)), a_prompt(64)
    with a_pair((1, 32), (4, 16)) as (prefill, decode):
        ticket = prefill.prefill(kv, some_blocks(64, 32, 1), prompt)
        decode.silent_ranks.add(2)
        load = decode.load(prompt, ticket, some_blocks(64, 16, 2), 0)
        decode.step_until(lambda: decode.has_unsaid(2))
        for _ in range(20):
            decode.step()
        assert decode.received == []
        decode.silent_ranks.clear()
        decode.step_until(lambda: decode.received or decode.failed)
        assert decode.received == [load.transfer]
        assert decode.failed == []


def test_one_failing_rank_of_the_peer_fails_the_load_everywhere() -> None:
    """A rank of the peer is gone: the load fails once, and no local block was written."""
    prompt, kv = list(range(64)), a_prompt(64)
    with a_pair((2, 16), (1, 32)) as (prefill, decode):
        ticket = prefill.prefill(kv, some_blocks(64, 16, 1), prompt)
        prefill.workers[1].close()
        decode.load(prompt, ticket, some_blocks(64, 32, 2), 0)
        decode.step_until(lambda: decode.received or decode.failed)
        assert decode.received == []
        (failure,) = decode.failed
        assert failure.cause.startswith("lost engine ")
        assert not any(cache.any() for cache in decode.caches)


@pytest.mark.parametrize(
    ("p", "d", "changes", "words"),
    [
        ((1, 16), (1, 24), {}, "block sizes of which neither divides the other: 16 there, 24"),
        ((1, 16), (1, 32), {"model": "n"}, "different models: 'm' there, 'n' here"),
        ((1, 16), (1, 32), {"dtype": "int32"}, "different dtypes: 'float32' there, 'int32'"),
        ((1, 16), (1, 32), {"num_layers": 3}, "different numbers of layers: 2 there, 3 here"),
        ((1, 16), (1, 32), {"head_dim": 6}, "different head sizes: 3 there, 6 here"),
        ((1, 16), (2, 16), {"num_kv_heads": 3}, "different numbers of KV heads: 4 there, 6 here"),
        ((2, 16), (3, 16), {}, "numbers of ranks of which neither divides the other: 2 there, 3"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_in_a_sentence(
    p: tuple[int, int], d: tuple[int, int], changes: dict[str, Any], words: str
) -> None:
    """The load fails before anything is read, and its cause says what differs."""
    prompt, kv = list(range(40)), a_prompt(40)
    with a_pair(p, d, changes) as (prefill, decode):
        ticket = prefill.prefill(kv, some_blocks(40, p[1], 1), prompt)
        decode.load(prompt, ticket, some_blocks(40, d[1], 2), 0)
        decode.step_until(lambda: decode.received or decode.failed)
        assert decode.received == []
        (failure,) = decode.failed
        assert words in failure.cause
        assert not any(cache.any() for cache in decode.caches)


def test_a_ticket_with_another_block_size_than_its_engine_is_refused() -> None:
    """A ticket that counts in other blocks than the handshake says would name wrong blocks."""
    prompt, kv = list(range(32)), a_prompt(32)
    with a_pair((1, 16), (1, 32)) as (prefill, decode):
        ticket = prefill.prefill(kv, [3, 4], prompt)
        ticket |= {"block_size": 8, "block_ids": [3, 4, 5, 6], "generations": [0, 1, 2, 3]}
        decode.load(prompt, ticket, [1], 0)
        decode.step_until(lambda: decode.received or decode.failed)
        (failure,) = decode.failed
        assert "blocks of 8 tokens" in failure.cause
        assert not decode.caches[0].any()


def test_a_layout_that_is_not_that_of_the_blocks_is_refused() -> None:
    """A rank cannot register memory under a layout of another size or rank."""
    layout = a_layout(16, 0, 2)
    worker = NixlConnector(NixlConfig(block_size=16)).worker_side(1)
    with pytest.raises(ConfigError, match="rank 1 has blocks of 16 tokens"):
        worker.register_kv_caches(_kv_caches(_memory(layout), layout))
