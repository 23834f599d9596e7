"""The parts of the offload connector by themselves."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore import KVCacheManager, LRUBlockPool, UnifiedScheduler, VirtualClock
from pdcore.connector.offload import OffloadConfig, OffloadSchedulerConnector
from pdcore.connector.offload.lru import SlotLRU
from pdcore.connector.offload.records import HEADER_BYTES, RecordFormat
from pdcore.connector.offload.store import RecordStore
from pdcore.connector.offload.writes import PendingWrites
from pdcore.errors import ConfigError

KEYS = [bytes([name]) for name in range(6)]
FORMAT = RecordFormat("model", 40)


def make_record(key: bytes, *, number: int = 1, body: int = 7) -> np.ndarray:
    record = np.full(FORMAT.record_bytes, body, np.uint8)
    FORMAT.stamp(record, key)
    FORMAT.seal(record, number)
    return record


class _NaiveLRU:
    """The same as lists: keys from the least to the most recently used, and who is pinned."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_of: dict[bytes, int] = {}
        self.order: list[bytes] = []
        self.pins: list[tuple[bytes, int]] = []

    def is_pinned(self, slot: int) -> bool:
        return any(pinned == slot for _, pinned in self.pins)

    def touch(self, key: bytes) -> None:
        if key in self.slot_of and not self.is_pinned(self.slot_of[key]):
            self.order.remove(key)
            self.order.append(key)

    def evicts(self) -> bytes | None:
        loose = [key for key in self.order if not self.is_pinned(self.slot_of[key])]
        return loose[0] if loose else None


@given(
    num_slots=st.integers(1, 4),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["insert", "touch", "pin", "unpin", "remove", "clear"]),
            st.sampled_from(KEYS),
        ),
        max_size=40,
    ),
)
def test_slots_go_to_the_least_recently_used_key_that_nobody_pins(
    num_slots: int, calls: list[tuple[str, bytes]]
) -> None:
    """After any calls the slots are as in a naive model, and none is lost or double."""
    lru, naive = SlotLRU(num_slots), _NaiveLRU(num_slots)
    for call, key in calls:
        if call == "insert" and key not in lru:
            used = set(naive.slot_of.values()) | {slot for _, slot in naive.pins}
            victim = None if len(used) < num_slots else naive.evicts()
            slot = lru.insert(key)
            if len(used) == num_slots and victim is None:
                assert slot is None
                continue
            if victim is not None:
                assert slot == naive.slot_of.pop(victim)
                naive.order.remove(victim)
            assert slot is not None
            assert slot not in set(naive.slot_of.values()) | {slot for _, slot in naive.pins}
            naive.slot_of[key] = slot
            naive.order.append(key)
        elif call == "touch":
            lru.touch(key)
            naive.touch(key)
        elif call == "pin" and key in lru:
            naive.pins.append((key, lru.pin(key)))
            assert naive.pins[-1][1] == naive.slot_of[key]
        elif call == "unpin" and naive.pins:
            pinned, slot = naive.pins.pop(0)
            lru.unpin(slot)
            if naive.slot_of.get(pinned) == slot:
                naive.touch(pinned)
        elif call == "remove":
            lru.remove(key)
            if naive.slot_of.pop(key, None) is not None:
                naive.order.remove(key)
        elif call == "clear":
            lru.clear()
            naive.slot_of.clear()
            naive.order.clear()
        lru.check()
        assert {key: lru.slot(key) for key in KEYS if key in lru} == naive.slot_of
        assert lru.num_unpinned == num_slots - len({slot for _, slot in naive.pins})


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["add", "forget", "pop"]), st.integers(0, 3), st.integers(0, 3)),
        max_size=30,
    )
)
def test_waiting_writes_have_each_slot_once(calls: list[tuple[str, int, int]]) -> None:
    """The newest write from a slot, or to one, is the one that is made; oldest first."""
    writes, naive = PendingWrites(), list[tuple[int, int]]()
    for call, source, target in calls:
        if call == "add":
            writes.add(source, target)
            naive = [pair for pair in naive if pair[0] != source and pair[1] != target]
            naive.append((source, target))
        elif call == "forget":
            writes.forget(source)
            naive = [pair for pair in naive if pair[0] != source]
        elif naive:
            assert writes.pop() == naive.pop(0)
        assert len(writes) == len(naive)
    assert writes.clear() == len(naive)
    assert not writes


@given(
    place=st.integers(0, FORMAT.record_bytes - 1),
    flip=st.integers(1, 255),
    key=st.sampled_from(KEYS),
)
def test_one_changed_byte_anywhere_is_found(place: int, flip: int, key: bytes) -> None:
    """A sealed record counts only as it was sealed, whichever byte differs."""
    record = make_record(key)
    assert FORMAT.fault(record, key, is_sealed=True) is None
    record[place] ^= flip
    assert FORMAT.fault(record, key, is_sealed=True) is not None


def test_a_record_of_something_else_is_refused() -> None:
    """Another prefix, another model, and a cache that was reset."""
    record = make_record(b"key")
    assert "another prefix" in (FORMAT.fault(record, b"kez", is_sealed=True) or "")
    assert "no record" in (RecordFormat("other", 40).fault(record, b"key", is_sealed=True) or "")
    later = RecordFormat("model", 40)
    later.reset(1)
    assert "no record" in (later.fault(record, b"key", is_sealed=True) or "")


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[..., RecordStore]:
    def open_it(*, num_slots: int = 8, persistent: bool = True) -> RecordStore:
        return RecordStore(
            tmp_path,
            record_format=FORMAT,
            rank=0,
            num_bytes=num_slots * FORMAT.record_bytes,
            persistent=persistent,
        )

    return open_it


def test_the_next_engine_finds_the_newest_record_of_each_key(
    tmp_path: Path, open_store: Callable[..., RecordStore]
) -> None:
    """Oldest first, whatever their slots; what is no record is passed over."""
    store = open_store()
    (path,) = tmp_path.glob("*.kv")
    with path.open("r+b") as file:
        for slot, key, number in [(5, b"a", 1), (2, b"b", 9), (7, b"a", 4), (0, b"c", 7)]:
            file.seek(slot * FORMAT.record_bytes)
            file.write(make_record(key, number=number).tobytes())
        file.seek(3 * FORMAT.record_bytes)
        file.write(b"\xff" * HEADER_BYTES)
    store.close()
    assert open_store().entries() == [(7, b"a"), (0, b"c"), (2, b"b")]


def test_a_store_without_a_name_leaves_nothing(
    tmp_path: Path, open_store: Callable[..., RecordStore]
) -> None:
    """Its room is free again as soon as it is closed, or its process ends."""
    store = open_store(persistent=False)
    assert store.entries() == []
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_two_engines_do_not_share_a_store(open_store: Callable[..., RecordStore]) -> None:
    """The second is refused, until the first one closes."""
    first = open_store()
    with pytest.raises(ConfigError, match="another engine keeps its KV"):
        open_store()
    first.close()
    open_store().close()


def test_a_file_whose_name_goes_while_it_is_opened_is_not_used(
    open_store: Callable[..., RecordStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last engine had a reset, so what is in it is void."""
    first, flock = open_store(), fcntl.flock
    (path,) = tmp_path.glob("*.kv")
    with path.open("r+b") as file:
        file.write(make_record(b"void").tobytes())

    def lock_late(fd: int, operation: int) -> None:
        if first.fd >= 0:
            first.forget_name()
            first.close()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    second = open_store()
    assert second.entries() == []
    assert path.exists()
    second.close()


def test_a_reset_deletes_no_name_of_another_file(
    open_store: Callable[..., RecordStore], tmp_path: Path
) -> None:
    """When somebody deleted an engine's file, another engine may have one under that name."""
    first = open_store()
    (path,) = tmp_path.glob("*.kv")
    path.unlink()
    second = open_store()
    first.forget_name()
    assert path.exists()
    for store in (first, second):
        store.close()


def test_a_damaged_number_does_not_end_the_numbering(
    open_store: Callable[..., RecordStore], tmp_path: Path
) -> None:
    """Newer records must have larger ones, of 64 bits."""
    open_store().close()
    (path,) = tmp_path.glob("*.kv")
    with path.open("r+b") as file:
        file.write(make_record(b"a", number=2**64 - 1).tobytes())
        file.write(make_record(b"b", number=3).tobytes())
    store = open_store()
    assert store.entries() == [(1, b"b")]
    assert store.last_number == 3
    store.close()


def test_a_disk_without_room_is_found_at_the_start(
    open_store: Callable[..., RecordStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the first blocks are written."""
    with pytest.raises(ConfigError, match="cannot be had"):
        open_store(num_slots=1 << 50)
    with pytest.raises(ConfigError, match="does not hold one record"):
        open_store(num_slots=0)


def test_workers_hear_of_a_reset_in_the_next_step() -> None:
    """Also if nothing is saved or loaded, and again if that step was taken back, or failed."""
    half = OffloadSchedulerConnector(OffloadConfig(host_bytes=1))
    manager = KVCacheManager(LRUBlockPool(8, 4))
    scheduler = UnifiedScheduler(manager, connector=half, clock=VirtualClock())
    assert scheduler.schedule().connector_meta is None
    assert scheduler.reset_prefix_cache()
    for dispatched in (False, True, False):
        assert scheduler.has_requests()
        plan = scheduler.schedule()
        assert plan.connector_meta.num_resets == 1
        later = scheduler.schedule()
        assert later.connector_meta is None
        scheduler.abandon(later, dispatched=dispatched)
        scheduler.abandon(plan, dispatched=dispatched)
