"""Sending blocks: what happens when it is to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdcore.clock import VirtualClock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import PeerInfo, PushTask
from pdcore.connector.nixl.mover import MoveResult
from pdcore.connector.nixl.push import writers as push_writers
from pdcore.connector.nixl.push.writer import Write
from pdcore.connector.nixl.push.writers import PushWriters


class LateWriter:
    """Ends its write just when it is told to stop."""

    made: list[LateWriter]

    def __init__(self, *_: Any, report: Callable[[MoveResult[Write]], None], **__: Any) -> None:
        self.made.append(self)
        self._report = report
        self._tasks: list[Write] = []

    def submit(self, task: Write) -> None:
        self._tasks.append(task)

    def stop(self) -> None:
        for task in self._tasks:
            self._report(MoveResult(task=task))

    def join(self, timeout_s: float) -> bool:
        return True


def test_no_write_begins_while_the_writers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV memory may be gone by the time that it would be sent."""
    monkeypatch.setattr(LateWriter, "made", [], raising=False)
    monkeypatch.setattr(push_writers, "PeerWriter", LateWriter)
    writers = PushWriters(
        MemoryRegion(address=1, num_blocks=8, bytes_per_block=8, mem_type="DRAM", device_id=0),
        config=NixlConfig(block_size=4),
        rank=0,
        clock=VirtualClock(),
        notify=lambda: None,
    )
    writers.order((a_task(0), a_task(1)), ())
    writers.send()
    writers.close()
    assert len(LateWriter.made) == 1


def a_task(first: int) -> PushTask:
    return PushTask(
        push_id="x",
        attempt=1,
        peer=PeerInfo(peer_id="d:1", name="d", ranks=()),
        first=first,
        block_ids=np.array([first + 1], np.int32),
        slots=np.array([first], np.int32),
    )
