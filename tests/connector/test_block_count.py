"""A block pool that is larger than the workers' KV memory is refused where both are first known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from pdcore import KVCacheManager, LRUBlockPool, Request, UnifiedScheduler, VirtualClock
from pdcore.connector import KVCaches, KVConnector
from pdcore.connector.block_count import BlockCount
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.connector.multi import MultiConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.connector.offload import OffloadConfig, OffloadConnector
from pdcore.errors import ConfigError
from pdcore.kvcache import KVCacheConfig
from pdcore.testing import FakeKVRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 8
WORDS = r"block pool has 9 blocks, but {} has 8: give LRUBlockPool the num_blocks"


def loopback(block_size: int = BLOCK_SIZE) -> KVConnector:
    return LoopbackConnector(LoopbackFabric(), engine_id="e", block_size=block_size)


def nixl(block_size: int = BLOCK_SIZE) -> KVConnector:
    pytest.importorskip("nixl")
    return NixlConnector(NixlConfig(block_size=block_size))


def offload(block_size: int = BLOCK_SIZE) -> KVConnector:
    return OffloadConnector(OffloadConfig(host_bytes=1 << 20))


def multi(block_size: int = BLOCK_SIZE) -> KVConnector:
    return MultiConnector({"offload": offload(), "loopback": loopback()})


Make = Callable[..., KVConnector]
makes = pytest.mark.parametrize("make", [loopback, nixl, offload, multi])


class Parts:
    """An engine that is put together: what its workers and its scheduler are."""

    def __init__(self, connector: KVConnector) -> None:
        self.half, self._worker = connector.scheduler_side(), connector.worker_side()
        self.half.start(clock=VirtualClock(), notify=lambda: None)

    def meet_workers(self) -> None:
        buffer = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.uint64)
        caches = KVCaches(buffer=buffer, bytes_per_block=8 * BLOCK_SIZE, fingerprint="f")
        self._worker.register_kv_caches(caches)
        self.half.set_xfer_handshake_metadata([self._worker.get_handshake_metadata()])

    def meet_scheduler(self, num_blocks: int) -> None:
        manager = KVCacheManager(LRUBlockPool(num_blocks, BLOCK_SIZE))
        UnifiedScheduler(manager, connector=self.half, clock=VirtualClock())

    def close(self) -> None:
        self._worker.close()
        self.half.close()


@pytest.fixture
def parts() -> Iterator[Callable[[KVConnector], Parts]]:
    """Makes parts, and closes them."""
    with ExitStack() as stack:

        def make(connector: KVConnector) -> Parts:
            made = Parts(connector)
            stack.callback(made.close)
            return made

        yield make


@makes
def test_whoever_comes_second_finds_out(make: Make, parts: Callable[..., Parts]) -> None:
    """The scheduler whose pool is too large for workers that are there, and workers whose memory
    is too small for a scheduler that is; with both numbers, and what to do."""
    words = WORDS.format("rank 0's KV memory")
    made = parts(make())
    made.meet_workers()
    with pytest.raises(ConfigError, match=words):
        made.meet_scheduler(NUM_BLOCKS + 1)
    made = parts(make())
    made.meet_scheduler(NUM_BLOCKS + 1)
    with pytest.raises(ConfigError, match=words):
        made.meet_workers()


@makes
@pytest.mark.parametrize("num_blocks", [2, NUM_BLOCKS])
def test_a_pool_that_fits_is_taken(
    make: Make, parts: Callable[..., Parts], num_blocks: int
) -> None:
    """Block 0, which the pool never hands out, counts on both sides; workers may have more."""
    for is_scheduler_first in (True, False):
        made = parts(make())
        if is_scheduler_first:
            made.meet_scheduler(num_blocks)
            made.meet_workers()
        else:
            made.meet_workers()
            made.meet_scheduler(num_blocks)


@pytest.mark.parametrize("make", [loopback, nixl])
def test_a_pool_with_other_blocks_is_refused(make: Make, parts: Callable[..., Parts]) -> None:
    """The connector counts tokens in blocks of the size that it was told."""
    with pytest.raises(ConfigError, match=r"block_size=8, but .* blocks of 4 tokens"):
        parts(make(block_size=8)).meet_scheduler(NUM_BLOCKS)


def test_the_smallest_rank_counts() -> None:
    """It is the one that is named."""
    count = BlockCount()
    count.of_pool(9)
    with pytest.raises(ConfigError, match=WORDS.format("rank 1's KV memory")):
        count.of_ranks([9, 8, 12])


def test_without_a_connector_the_first_plan_finds_out() -> None:
    """Its blocks are all there; later ones would not be."""
    manager = KVCacheManager(LRUBlockPool(NUM_BLOCKS + 1, BLOCK_SIZE))
    scheduler = UnifiedScheduler(manager, clock=VirtualClock())
    runner = FakeKVRunner(block_size=BLOCK_SIZE)
    config: dict[str, Any] = {"spec": runner.get_kv_cache_spec(), "num_blocks": NUM_BLOCKS}
    runner.initialize_from_config(KVCacheConfig(**config))
    scheduler.add_request(Request("r", [1, 2, 3]))
    with pytest.raises(ConfigError, match=WORDS.format("this worker's KV cache")):
        runner.execute_model(scheduler.schedule())
