"""Reading from a peer whose ranks or blocks are of another size than ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.clock import Clock
from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.meta import PeerInfo, ReadTask
from pdcore.connector.nixl.reader import PeerReader, ReadResult
from pdcore.connector.nixl.reshaping import ChunkMap, chunks_of, copy_chunks, head_slices
from pdcore.connector.nixl.staging import StagingArea
from pdcore.connector.stats import TransferStats
from pdcore.errors import ConfigError
from pdcore.messages import TransferKey

__all__ = ["ReshapingReader"]

logger = logging.getLogger(__name__)


@attrs.define(eq=False, kw_only=True)
class _Load:
    """A load, which is moved in pieces if it is larger than the staging area."""

    task: ReadTask
    chunks: ChunkMap
    queued_at: float
    pieces: Iterator[ChunkMap]
    piece: ChunkMap | None = None
    slots: npt.NDArray[np.int64]
    num_unread: int = 0
    cause: str = ""
    measured: list[TransferStats] = attrs.field(factory=list)


class ReshapingReader:
    """Reads from all ranks of a peer that have something for this one, as `PeerReader` does.

    The peer's blocks land in a staging area, one for each of its ranks; once those of all ranks
    are there, they are copied into the local blocks. So only this class ever writes to a local
    block, and a late write hits nothing but staging slots, which are used again only when every
    rank's read of them is known to be over.

    Args:
        cache: the local blocks, as `as_heads` shows them.
        layout: this rank's layout.
        peer: whom to read from.
        max_staging_bytes: how large the staging areas may be together; at least one block of each
            rank is staged. Loads wait until there is room, in order; larger ones come in pieces.
        clock, stall_timeout_s, idle_timeout_s, report, call_peer: as for `PeerReader`. The last two
            may be called on several threads.
    """

    def __init__(
        self,
        cache: npt.NDArray[Any],
        layout: KVLayout,
        peer: PeerInfo,
        *,
        max_staging_bytes: int,
        clock: Clock,
        stall_timeout_s: float,
        idle_timeout_s: float,
        report: Callable[[ReadResult], None],
        call_peer: Callable[[TransferKey], None],
    ) -> None:
        remote = peer.ranks[0].layout
        if remote is None:
            raise ConfigError(f"{peer.name} does not describe its KV's layout")
        self._cache = cache
        self._layout = layout
        self._remote = remote
        self._peer = peer
        self._clock = clock
        self._report = report
        self._heads = head_slices(remote, layout)
        num_slots = max(1, max_staging_bytes // (remote.bytes_per_block * len(self._heads)))
        self._areas = [StagingArea(remote, num_slots=num_slots) for _ in self._heads]
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._free = np.arange(num_slots, dtype=np.int64)
        self._waiting: dict[TransferKey, _Load] = {}
        self._active: dict[TransferKey, _Load] = {}
        self._readers = [
            PeerReader(
                area.region,
                peer,
                rank=heads.rank,
                clock=clock,
                stall_timeout_s=stall_timeout_s,
                idle_timeout_s=idle_timeout_s,
                report=self._part_ended,
                call_peer=call_peer,
            )
            for area, heads in zip(self._areas, self._heads, strict=True)
        ]

    def submit(self, task: ReadTask) -> None:
        """Queue a read; returns at once."""
        chunks = chunks_of(
            start=task.num_local_tokens,
            end=task.num_local_tokens + task.num_external_tokens,
            remote_block_size=self._remote.block_size,
            local_block_size=self._layout.block_size,
            remote_block_ids=task.remote_block_ids,
            local_block_ids=task.local_block_ids,
        )
        load = _Load(
            task=task,
            chunks=chunks,
            queued_at=self._clock.now(),
            pieces=iter(()),
            slots=np.zeros(0, dtype=np.int64),
        )
        with self._lock:
            self._waiting[task.transfer] = load
        self._start_waiting()

    def cancel(self, transfer: TransferKey) -> None:
        """Drop a read as far as it was not posted yet; what was posted runs to its end."""
        with self._lock:
            load = self._waiting.pop(transfer, None)
            active = self._active.get(transfer)
            if active is not None:
                active.cause = active.cause or "cancelled"
        if load is not None:
            self._report(ReadResult(task=load.task, cause="cancelled before it began"))
        if active is not None:
            for reader in self._readers:
                reader.cancel(transfer)
        self._start_waiting()

    def cut_off(self, cause: str) -> None:
        """Stop all reads by force."""
        self._fail_waiting(f"lost {self._peer.name}: {cause}")
        for reader in self._readers:
            reader.cut_off(cause)

    @property
    def is_idle(self) -> bool:
        """Whether it holds no agent and has nothing to do. For the submitting thread."""
        with self._lock:
            has_loads = bool(self._waiting or self._active)
        return not has_loads and all(reader.is_idle for reader in self._readers)

    def stop(self) -> None:
        """Stop all reads by force and end the threads; returns at once, see `join`."""
        self._fail_waiting("this engine is closing")
        with self._lock:
            for load in self._active.values():
                load.cause = load.cause or "this engine is closing"
        for reader in self._readers:
            reader.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after `stop`; return whether they did."""
        deadline = self._clock.now() + timeout_s
        return all(reader.join(max(0.0, deadline - self._clock.now())) for reader in self._readers)

    def _fail_waiting(self, cause: str) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for load in waiting.values():
            self._report(ReadResult(task=load.task, cause=cause))

    def _start_waiting(self) -> None:
        """Give slots to the loads whose turn it is."""
        while True:
            with self._lock:
                load = next(iter(self._waiting.values()), None)
                if load is None:
                    return
                num_slots = min(load.chunks.remote_block_ids.size, self._num_slots)
                if num_slots > self._free.size:
                    return
                del self._waiting[load.task.transfer]
                load.slots, self._free = self._free[:num_slots], self._free[num_slots:]
                load.pieces = load.chunks.pieces(max(1, num_slots))
                self._active[load.task.transfer] = load
            self._next_piece(load)

    def _next_piece(self, load: _Load) -> None:
        """Ask every rank for the next piece; after the last one, or a failure, end the load."""
        load.piece = None if load.cause else next(load.pieces, None)
        if load.piece is None:
            self._end(load)
            return
        remote_ids = load.piece.remote_block_ids
        load.num_unread = len(self._readers)
        task = attrs.evolve(
            load.task,
            local_block_ids=load.slots[: remote_ids.size].astype(np.int32),
            remote_block_ids=remote_ids,
        )
        for reader in self._readers:
            reader.submit(task)

    def _part_ended(self, result: ReadResult) -> None:
        """One rank's read of a piece is over, and nothing writes to its slots any more."""
        with self._lock:
            load = self._active[result.task.transfer]
            load.num_unread -= 1
            if result.stats is not None:
                load.measured.append(result.stats)
            else:
                load.cause = load.cause or result.cause
            is_last = load.num_unread == 0
        if is_last:
            self._take_piece(load)

    def _take_piece(self, load: _Load) -> None:
        try:
            if not load.cause and load.piece is not None:
                self._copy(load, load.piece)
        except Exception as error:
            logger.exception("rearranging KV from %s failed", self._peer.name)
            load.cause = f"an internal error of the reader: {error!r}"
        self._next_piece(load)

    def _copy(self, load: _Load, piece: ChunkMap) -> None:
        for heads, area in zip(self._heads, self._areas, strict=True):
            copy_chunks(piece, heads, staged=area.heads, slots=load.slots, cache=self._cache)

    def _end(self, load: _Load) -> None:
        with self._lock:
            del self._active[load.task.transfer]
            self._free = np.sort(np.concatenate((self._free, load.slots)))
        stats = None if load.cause else self._stats(load)
        self._report(ReadResult(task=load.task, stats=stats, cause=load.cause))
        self._start_waiting()

    def _stats(self, load: _Load) -> TransferStats:
        now = self._clock.now()
        parts = load.measured
        return TransferStats(
            transfer=load.task.transfer,
            peer=self._peer.name,
            num_bytes=sum(part.num_bytes for part in parts),
            num_blocks=sum(part.num_blocks for part in parts),
            num_descriptors=sum(part.num_descriptors for part in parts),
            queued_at=load.queued_at,
            started_at=min((part.started_at for part in parts), default=now),
            ended_at=now,
        )

    def __repr__(self) -> str:
        return (
            f"<ReshapingReader {self._peer.name}: {len(self._waiting)} waiting, "
            f"{len(self._active)} in flight>"
        )
