"""The worker's half over a real file: what is wrong with the disk costs blocks, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("nixl")

from offload_simulation import make_config
from pdcore.connector import KVCaches
from pdcore.connector.offload import OffloadWorkerConnector
from pdcore.connector.offload.meta import LoadOrder, OffloadMeta, Place, SaveOrder
from pdcore.connector.offload.records import HEADER_BYTES
from pdcore.errors import ConfigError
from pdcore.messages import LoadFailure, TransferKey

pytestmark = pytest.mark.nixl

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 4, 32, 24
RECORD_BYTES = HEADER_BYTES + 8 * BLOCK_SIZE


class Half:
    """A worker's half, and the memory that it works on."""

    def __init__(self, directory: Path) -> None:
        self.kv = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.uint64)
        config = make_config(
            BLOCK_SIZE,
            num_host_blocks=NUM_SLOTS,
            num_disk_blocks=NUM_SLOTS,
            directory=directory,
            persistent=True,
            background=False,
        )
        self.worker = OffloadWorkerConnector(config, rank=0)
        self.worker.register_kv_caches(
            KVCaches(buffer=self.kv, bytes_per_block=8 * BLOCK_SIZE, fingerprint="f")
        )
        (self.path,) = directory.glob("*.kv")
        self._num_loads = 0

    def step(self, meta: OffloadMeta) -> None:
        self.worker.start_save_kv(meta)
        self.worker.start_load_kv(meta)

    def save(self, num_blocks: int) -> None:
        """Save the first blocks to both tiers, each in the slot of its number."""
        orders = tuple(SaveOrder(n, n, n, _key(n)) for n in range(num_blocks))
        self.step(OffloadMeta(saves=orders))
        assert not self.worker.get_finished()

    def load(self, places: list[Place]) -> LoadFailure | None:
        """Load into the blocks behind the first eight; return what went wrong."""
        self._num_loads += 1
        order = LoadOrder(
            transfer=TransferKey(self._num_loads, 1),
            num_local_tokens=0,
            block_size=BLOCK_SIZE,
            block_ids=tuple(range(8, 8 + len(places))),
            places=tuple(places),
        )
        self.kv[8:] = 0
        self.step(OffloadMeta(loads=(order,)))
        report = self.worker.get_finished()
        assert len(report.failed) + len(report.finished_recving) == 1
        return report.failed[0] if report.failed else None

    def load_from_disk(self, num_blocks: int) -> int:
        """Load the first blocks; return how many came, which are as they were saved."""
        expected = self.kv[:num_blocks].copy()
        failure = self.load([Place(_key(n), n, True) for n in range(num_blocks)])
        num_valid = num_blocks if failure is None else failure.num_valid_tokens // BLOCK_SIZE
        assert (self.kv[8 : 8 + num_valid] == expected[:num_valid]).all()
        return num_valid


def _key(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Half]:
    half = Half(tmp_path)
    half.kv[:8] = np.random.default_rng(1).integers(1, 1 << 60, (8, BLOCK_SIZE))
    yield half
    half.worker.close()


shared_half = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@shared_half
@given(length=st.integers(0, 8 * RECORD_BYTES - 1))
def test_of_a_file_that_was_cut_the_whole_records_before_the_cut_come_back(
    half: Half, length: int
) -> None:
    """Also when the same records were read before into the same memory."""
    half.save(8)
    assert half.load_from_disk(8) == 8
    os.truncate(half.path, length)
    assert half.load_from_disk(8) == length // RECORD_BYTES
    os.truncate(half.path, NUM_SLOTS * RECORD_BYTES)
    assert half.load_from_disk(8) == length // RECORD_BYTES


@shared_half
@given(place=st.integers(0, 8 * RECORD_BYTES - 1), flip=st.integers(1, 255))
def test_a_changed_byte_costs_its_record_and_those_behind_it(
    half: Half, place: int, flip: int
) -> None:
    """What came before is kept."""
    half.save(8)
    with half.path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ flip]))
    assert half.load_from_disk(8) == place // RECORD_BYTES


@pytest.fixture
def descriptor(half: Half) -> int:
    """The number under which the half has its file open."""
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == str(half.path.resolve()):
            return int(name)
    raise AssertionError("the file is not open")


@pytest.mark.parametrize("target", ["/dev/full", "read-only"])
def test_a_disk_that_takes_no_writes_loses_blocks_and_no_step(
    half: Half, descriptor: int, target: str
) -> None:
    """Their records are not there when they are to come back; host memory has them all the same."""
    path = str(half.path) if target == "read-only" else target
    flags = os.O_RDONLY if target == "read-only" else os.O_WRONLY
    original, bad = os.dup(descriptor), os.open(path, flags)
    os.dup2(bad, descriptor)
    half.save(8)
    os.dup2(original, descriptor)
    os.close(bad)
    os.close(original)
    assert half.load([Place(_key(n), n, False) for n in range(8)]) is None
    assert half.load_from_disk(8) == 0
    half.save(8)
    assert half.load_from_disk(8) == 8


def test_a_disk_that_fails_three_times_in_a_row_is_left_alone(half: Half, descriptor: int) -> None:
    """Loads from it then fail at once, and host memory goes on."""
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
    causes = []
    for _ in range(4):
        failure = half.load([Place(_key(0), 0, True)])
        assert failure is not None
        causes.append(failure.cause)
    assert "not used now" in causes[-1]
    half.save(8)
    assert half.load([Place(_key(n), n, False) for n in range(8)]) is None


def test_a_slot_that_gets_another_block_before_its_write_is_not_written(half: Half) -> None:
    """The record on disk would be the other's; so there is none, and no wrong one."""
    half.step(OffloadMeta(saves=(SaveOrder(1, 0, 5, _key(1)),)))
    half.step(OffloadMeta(saves=(SaveOrder(2, 0, -1, _key(2)),)))
    half.worker.get_finished()
    failure = half.load([Place(_key(1), 5, True)])
    assert failure is not None
    assert "no record" in failure.cause
    assert half.load([Place(_key(2), 0, False)]) is None
    assert (half.kv[8] == half.kv[2]).all()


def test_a_save_that_was_lost_is_a_miss(half: Half) -> None:
    """A slot whose order went down with its step still says whose record it has."""
    half.save(2)
    failure = half.load([Place(_key(0), 0, False), Place(_key(9), 1, False)])
    assert failure is not None
    assert failure.num_valid_tokens == BLOCK_SIZE
    assert "another prefix" in failure.cause


def test_a_save_that_fails_half_way_leaves_no_record(half: Half) -> None:
    """The bytes of its slot are the new block's, so it no longer counts as the old one's."""
    half.save(2)
    orders = (SaveOrder(5, 0, -1, _key(5)), SaveOrder(NUM_BLOCKS, 1, -1, _key(6)))
    with pytest.raises(IndexError):
        half.step(OffloadMeta(saves=orders))
    failure = half.load([Place(_key(0), 0, False)])
    assert failure is not None
    assert "no record" in failure.cause


def test_a_cancelled_load_is_answered_even_if_it_never_came(half: Half) -> None:
    """Its blocks are in quarantine until it is."""
    half.step(OffloadMeta(cancelled=(TransferKey(77, 1),)))
    (failure,) = half.worker.get_finished().failed
    assert failure.transfer == TransferKey(77, 1)


def test_what_was_saved_before_a_reset_is_void(half: Half) -> None:
    """In host memory, on disk, and in what still waited to be written."""
    half.save(4)
    half.step(OffloadMeta(saves=(SaveOrder(4, 4, 4, _key(4)),)))
    half.step(OffloadMeta(num_resets=1))
    for place in (Place(_key(0), 0, False), Place(_key(0), 0, True), Place(_key(4), 4, True)):
        failure = half.load([place])
        assert failure is not None
        assert "no record" in failure.cause


def test_the_next_engine_has_the_records_of_this_one(half: Half, tmp_path: Path) -> None:
    """All that were written, since closing finishes the writes."""
    kv = half.kv.copy()
    half.step(OffloadMeta(saves=tuple(SaveOrder(n, n, 10 + n, _key(n)) for n in range(8))))
    half.worker.close()
    after = Half(tmp_path)
    assert after.worker.get_handshake_metadata().stored == tuple(
        (10 + n, _key(n)) for n in range(8)
    )
    assert after.load([Place(_key(n), 10 + n, True) for n in range(8)]) is None
    assert (after.kv[8:16] == kv[:8]).all()
    after.worker.close()


def test_the_next_engine_has_no_records_of_before_a_reset(half: Half, tmp_path: Path) -> None:
    """It counts its resets from 0, so it could not tell them from its own."""
    half.save(4)
    half.step(OffloadMeta(num_resets=1))
    half.worker.close()
    after = Half(tmp_path)
    assert after.worker.get_handshake_metadata().stored == ()
    after.worker.close()


def test_memory_that_is_not_one_piece_is_refused(tmp_path: Path) -> None:
    """A block must be one run of bytes, of the size that was said."""
    config = make_config(BLOCK_SIZE, num_host_blocks=4)
    whole = np.zeros((8, 2 * BLOCK_SIZE), np.uint64)
    for buffer, match in ((whole[:, :BLOCK_SIZE], "not contiguous"), (whole, "bytes_per_block")):
        caches = KVCaches(buffer=buffer, bytes_per_block=8 * BLOCK_SIZE, fingerprint="f")
        with pytest.raises(ConfigError, match=match):
            OffloadWorkerConnector(config, rank=0).register_kv_caches(caches)
