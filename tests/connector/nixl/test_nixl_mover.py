"""One peer's mover, over real NIXL and with a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from nixl_engines import until

from pdcore.clock import VirtualClock
from pdcore.connector.base import KVCaches
from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import PeerInfo, RankEndpoint, ReadTask
from pdcore.connector.nixl.reader import PeerReader, ReadResult
from pdcore.messages import TransferKey

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]


def a_region(buffer: np.ndarray) -> MemoryRegion:
    return MemoryRegion.of(KVCaches(buffer=buffer, bytes_per_block=512, fingerprint=""))


class Reads:
    """Reads from a peer that never looks after its readers.

    Attributes:
        calls: the reads that the peer was called for.
        ended: how reads ended.
    """

    def __init__(self, endpoint: RankEndpoint) -> None:
        self.calls: list[TransferKey] = []
        self.ended: list[ReadResult] = []
        self._peer = PeerInfo(peer_id="p:1", name="p", ranks=(endpoint,))
        self._buffer = np.zeros((4, 64), np.uint64)
        self.reader = PeerReader(
            a_region(self._buffer),
            self._peer,
            rank=0,
            clock=VirtualClock(),
            stall_timeout_s=60,
            idle_timeout_s=60,
            report=self.ended.append,
            call_peer=self.calls.append,
        )

    def begin(self, number: int) -> TransferKey:
        ids = np.arange(4, dtype=np.int32)
        task = ReadTask(
            transfer=TransferKey(number, 0),
            peer=self._peer,
            local_block_ids=ids,
            remote_block_ids=ids,
            num_local_tokens=0,
        )
        self.reader.submit(task)
        return task.transfer

    def close(self) -> None:
        self.reader.stop()
        assert self.reader.join(30)


@pytest.fixture
def reads(network: dict[str, str]) -> Iterator[Reads]:
    """Over a network, where a read needs the peer."""
    memory = np.ones((4, 64), np.uint64)
    with closing(TransferAgent(a_region(memory))) as peer:
        endpoint = RankEndpoint(
            agent_metadata=peer.metadata(), region=a_region(memory), fingerprint=""
        )
        with closing(Reads(endpoint)) as made:
            yield made


def test_the_first_read_after_a_cut_calls_at_once(reads: Reads) -> None:
    """The peer may have gone to rest by then, so it is called however short ago the last call was:
    the clock stands still, and every read calls all the same."""
    for number in range(1, 4):
        transfer = reads.begin(number)
        until(lambda transfer=transfer: transfer in reads.calls)
        reads.reader.cut_off("enough")
        until(lambda number=number: len(reads.ended) == number)
        assert reads.ended[-1].cause == "lost p: enough"
