"""Sending blocks: what happens when it is to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pdcore.clock import VirtualClock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import PeerInfo, PushStop, PushTask
from pdcore.connector.nixl.mover import MoveResult
from pdcore.connector.nixl.push import writers as push_writers
from pdcore.connector.nixl.push.writer import Write
from pdcore.connector.nixl.push.writers import PushWriters
from pdcore.messages import PushReport

_NUM_PUSHES = 3000


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


class QuickWriter:
    """Ends each write at once, on a thread of its own."""

    def __init__(self, *_: Any, report: Callable[[MoveResult[Write]], None], **__: Any) -> None:
        self._report = report
        self._pool = ThreadPoolExecutor(1)
        self._futures: list[Future[None]] = []

    def submit(self, task: Write) -> None:
        self._futures.append(self._pool.submit(self._report, MoveResult(task=task)))

    def stop(self) -> None:
        for future in self._futures:
            future.result()

    def join(self, timeout_s: float) -> bool:
        self._pool.shutdown()
        return True


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def some_writers(mem_type: str = "DRAM") -> PushWriters:
    return PushWriters(
        MemoryRegion(address=1, num_blocks=8, bytes_per_block=8, mem_type=mem_type, device_id=0),
        config=NixlConfig(block_size=4),
        rank=0,
        clock=VirtualClock(),
        notify=lambda: None,
    )


def test_no_write_begins_while_the_writers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV memory may be gone by the time that it would be sent."""
    monkeypatch.setattr(LateWriter, "made", [], raising=False)
    monkeypatch.setattr(push_writers, "PeerWriter", LateWriter)
    writers = some_writers()
    writers.order((a_task(0), a_task(1)), ())
    writers.send()
    writers.close()
    assert len(LateWriter.made) == 1


@pytest.mark.usefixtures("restless")
def test_a_push_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its last write ends before, after or while it is told to end."""
    monkeypatch.setattr(push_writers, "PeerWriter", QuickWriter)
    writers = some_writers()
    reports: list[PushReport] = []
    for i in range(_NUM_PUSHES):
        writers.order((a_task(0, push_id=str(i)),), ())
        writers.send()
        writers.order((), (PushStop(push_id=str(i), is_wanted=True),))
        writers.send()
        reports += writers.take_reports()
    writers.close()
    reports += writers.take_reports()
    assert sorted(int(report.push_id) for report in reports) == list(range(_NUM_PUSHES))
    assert {report.num_blocks for report in reports} == {1}


def test_a_write_from_a_device_waits_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass was only begun when it returns; steps that send nothing wait for nothing."""
    torch = pytest.importorskip("torch")
    events: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            events.append("kernels ended")

    class Writer(LateWriter):
        def submit(self, task: Write) -> None:
            events.append("write began")

    monkeypatch.setattr(LateWriter, "made", [], raising=False)
    monkeypatch.setattr(push_writers, "PeerWriter", Writer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    writers = some_writers("VRAM")
    writers.order((), (PushStop(push_id="y", is_wanted=True),))
    writers.send()
    assert events == []
    writers.order((a_task(0),), ())
    writers.send()
    assert events == ["kernels ended", "write began"]
    writers.close()


def a_task(first: int, *, push_id: str = "x") -> PushTask:
    return PushTask(
        push_id=push_id,
        attempt=1,
        peer=PeerInfo(peer_id="d:1", name="d", ranks=()),
        first=first,
        block_ids=np.array([first + 1], np.int32),
        slots=np.array([first], np.int32),
    )
