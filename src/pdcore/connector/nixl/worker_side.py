"""The NIXL connector's half beside the model: it moves the bytes."""

from __future__ import annotations

import logging
import queue
from functools import partial

import attrs

from pdcore.clock import Clock, MonotonicClock
from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import Doorbell, NixlMeta, PeerInfo, RankEndpoint, ReadTask
from pdcore.connector.nixl.notices import NO_TRANSFER, NoticeKind, NoticeSender
from pdcore.connector.nixl.push.landing_area import LandingArea
from pdcore.connector.nixl.push.life_sign import LifeSign
from pdcore.connector.nixl.push.writers import PushWriters
from pdcore.connector.nixl.reader import PeerReader, ReadResult
from pdcore.connector.nixl.reshaping_reader import ReshapingReader
from pdcore.connector.nixl.serving import ServingAgent
from pdcore.connector.nixl.staging import as_heads
from pdcore.connector.stats import TransferStats
from pdcore.errors import ConfigError
from pdcore.messages import LoadFailure, TransferKey, TransferReport

__all__ = ["NixlWorkerConnector", "WorkerHandshake"]

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0
_MAX_FINGERPRINT = 1024


@attrs.frozen(kw_only=True)
class WorkerHandshake:
    """What a rank tells its engine's scheduler half.

    Args:
        endpoint: how peers reach its KV memory; doorbell: how to wake it for them.
        landing, landing_doorbell: the same of its staging memory for pushes, if it has any.
        life_port: where it can be seen to live, on the connector's host; 0 if it cannot.
    """

    endpoint: RankEndpoint
    doorbell: Doorbell
    landing: RankEndpoint | None = None
    landing_doorbell: Doorbell | None = None
    life_port: int = 0


class NixlWorkerConnector(WorkerConnector):
    """Reads blocks from peers and lets peers read its own.

    Nothing here blocks the model's thread: each peer is read on its own thread, and one more
    answers those who read from here. Loads are always asynchronous. A load is reported once nothing
    writes to its blocks any more, and never before.

    Args:
        config: the connector's settings.
        rank: which rank this is; it reads from the same rank of a peer, or from those that have
            its heads if the peer has another number of ranks.
        clock: for measurements and limits.
    """

    def __init__(self, config: NixlConfig, *, rank: int = 0, clock: Clock | None = None) -> None:
        self._config = config
        self._rank = rank
        self._clock = clock or MonotonicClock()
        self._region: MemoryRegion | None = None
        self._caches: KVCaches | None = None
        self._serving: ServingAgent | None = None
        self._readers: dict[str, PeerReader | ReshapingReader] = {}
        self._owners: dict[TransferKey, PeerReader | ReshapingReader] = {}
        self._results: queue.SimpleQueue[ReadResult] = queue.SimpleQueue()
        self._unknown: list[LoadFailure] = []
        self._notices: NoticeSender | None = None
        self._landing: LandingArea | None = None
        self._life: LifeSign | None = None
        self._pushes: PushWriters | None = None

    def register_kv_caches(self, caches: KVCaches) -> None:
        """Take the KV memory and open it to peers.

        Raises:
            ConfigError: the buffer is not contiguous, the fingerprint is not a line of text, the
                layout is not that of the blocks, or memory was registered before.
            MissingExtra: NIXL is not installed.
        """
        if self._serving is not None:
            raise ConfigError(
                "KV memory was registered before: make a new connector for new memory"
            )
        if len(caches.fingerprint) > _MAX_FINGERPRINT or not caches.fingerprint.isprintable():
            raise ConfigError(
                "the KV cache's fingerprint must be one line of at most "
                f"{_MAX_FINGERPRINT} characters"
            )
        self._check_layout(caches)
        self._region = MemoryRegion.of(caches)
        self._caches = caches
        self._serving = ServingAgent(
            self._region,
            clock=self._clock,
            doorbell_host=self._config.doorbell_host,
            busy_poll_s=self._config.busy_poll_s,
            idle_poll_s=self._config.idle_poll_s,
        )
        self._life = LifeSign(self._config.host)
        self._pushes = PushWriters(
            self._region,
            config=self._config,
            rank=self._rank,
            clock=self._clock,
            notify=partial(self._notify, NoticeKind.REPORT),
        )
        if self._config.push_staging_bytes:
            self._landing = LandingArea(caches, config=self._config, clock=self._clock)

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """How to reach this rank; None before there is memory to reach."""
        if self._serving is None or self._region is None or self._caches is None:
            return None
        endpoint = RankEndpoint(
            agent_metadata=self._serving.metadata,
            region=self._region,
            fingerprint=self._caches.fingerprint,
            layout=self._caches.layout,
        )
        landing = self._landing
        return WorkerHandshake(
            endpoint=endpoint,
            doorbell=self._serving.doorbell,
            landing=None if landing is None else landing.endpoint,
            landing_doorbell=None if landing is None else landing.doorbell,
            life_port=0 if self._life is None else self._life.port,
        )

    def start_load_kv(self, meta: NixlMeta | None) -> None:
        """Pass the step's orders on to the readers; returns at once."""
        if meta is None:
            return
        self._notify_at(meta.doorbell)
        if self._pushes is not None:
            self._pushes.order(meta.pushes, meta.push_stops)
        for task in meta.reads:
            self._start_read(task)
        for transfer in meta.cancels:
            if transfer in self._owners:
                self._owners[transfer].cancel(transfer)
            else:
                # Its order was lost with a step that failed, or its report was: it is quiet.
                self._unknown.append(
                    LoadFailure(transfer=transfer, num_valid_tokens=0, cause="cancelled")
                )
        for order in meta.cut_offs:
            if order.peer_id in self._readers:
                self._readers[order.peer_id].cut_off(order.cause)

    def wait_for_save(self) -> None:
        """What the forward pass completes may be sent. Waits for the device if it is to be."""
        if self._pushes is not None:
            self._pushes.send()

    def get_finished(self) -> TransferReport:
        finished: list[TransferKey] = []
        measured: list[TransferStats] = []
        failed, self._unknown = self._unknown, []
        while not self._results.empty():
            result = self._results.get()
            self._owners.pop(result.task.transfer, None)
            if result.stats is not None:
                measured.append(result.stats)
                finished.append(result.task.transfer)
            else:
                failed.append(_as_failure(result.task, result.cause))
        return TransferReport(
            finished_recving=tuple(finished),
            failed=tuple(failed),
            measured=tuple(measured),
            pushed=() if self._pushes is None else self._pushes.take_reports(),
        )

    def close(self) -> None:
        """Stop every read, close every agent, join every thread. May be called twice."""
        readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.stop()
        for reader in readers:
            if not reader.join(_JOIN_TIMEOUT_S):
                logger.error("%r did not stop within %g s", reader, _JOIN_TIMEOUT_S)
        pushes, self._pushes = self._pushes, None
        if pushes is not None:
            pushes.close()
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.close()
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()
        life, self._life = self._life, None
        if life is not None:
            life.close()
        self._notify_at(None)

    def _start_read(self, task: ReadTask) -> None:
        try:
            reader = self._reader_for(task.peer)
        except Exception as error:
            cause = f"no reader for {task.peer.name}: {error!r}"
            self._read_ended(ReadResult(task=task, cause=cause))
            return
        self._owners[task.transfer] = reader
        if task.staged_slots is not None and self._landing is not None:
            self._landing.submit(task, partial(self._copied, task, reader))
        else:
            reader.submit(task)

    def _copied(
        self, task: ReadTask, reader: PeerReader | ReshapingReader, rest: ReadTask | None
    ) -> None:
        """What was pushed is in place, or cannot be put there. On the landing area's thread."""
        if rest is None:
            self._read_ended(ReadResult(task=task, cause="pushed blocks could not be copied"))
        else:
            reader.submit(rest)

    def _reader_for(self, peer: PeerInfo) -> PeerReader | ReshapingReader:
        reader = self._readers.get(peer.peer_id)
        if reader is not None:
            return reader
        if self._region is None:
            raise ConfigError("no KV memory is registered: call register_kv_caches first")
        self._retire_readers()
        if peer.must_reshape:
            reader = self._reshaping_reader(peer)
        else:
            reader = PeerReader(
                self._region,
                peer,
                rank=self._rank,
                clock=self._clock,
                stall_timeout_s=self._config.stall_timeout_s,
                idle_timeout_s=self._config.idle_peer_timeout_s,
                report=self._read_ended,
                call_peer=self._call_peer,
            )
        self._readers[peer.peer_id] = reader
        return reader

    def _reshaping_reader(self, peer: PeerInfo) -> ReshapingReader:
        if self._caches is None or self._caches.layout is None:
            raise ConfigError("this rank's KVCaches have no layout")
        return ReshapingReader(
            as_heads(self._caches.buffer, self._caches.layout),
            self._caches.layout,
            peer,
            max_staging_bytes=self._config.max_staging_bytes,
            clock=self._clock,
            stall_timeout_s=self._config.stall_timeout_s,
            idle_timeout_s=self._config.idle_peer_timeout_s,
            report=self._read_ended,
            call_peer=self._call_peer,
        )

    def _check_layout(self, caches: KVCaches) -> None:
        layout = caches.layout
        if layout is None:
            return
        expected = (layout.bytes_per_block, layout.block_size, layout.tp_rank)
        if expected != (caches.bytes_per_block, self._config.block_size, self._rank):
            raise ConfigError(
                f"rank {self._rank} has blocks of {self._config.block_size} tokens and "
                f"{caches.bytes_per_block} bytes, but its layout says rank {layout.tp_rank}, "
                f"{layout.block_size} tokens and {layout.bytes_per_block} bytes: make "
                "NixlConfig.block_size and worker_side(rank=...) those of the model runner"
            )

    def _read_ended(self, result: ReadResult) -> None:
        """Keep a result for the next report, and say that there is one. On a reader's thread."""
        self._results.put(result)
        kind = NoticeKind.REPORT if result.stats is None else NoticeKind.ARRIVED
        self._notify(kind, result.task.transfer)

    def _call_peer(self, transfer: TransferKey) -> None:
        self._notify(NoticeKind.NEEDS_PEER, transfer)

    def _notify(self, kind: NoticeKind, transfer: TransferKey = NO_TRANSFER) -> None:
        """Tell the scheduler half. From any thread."""
        notices = self._notices
        if notices is not None:
            notices.send(kind, transfer)

    def _notify_at(self, address: Doorbell | None) -> None:
        notices = self._notices
        if notices is not None and notices.address == address:
            return
        self._notices = None if address is None else NoticeSender(address, rank=self._rank)
        if notices is not None:
            notices.close()

    def _retire_readers(self) -> None:
        """Let go of readers that have nothing to do and closed their agent: peers come and go."""
        busy = set(map(id, self._owners.values()))
        for peer_id, reader in tuple(self._readers.items()):
            if reader.is_idle and id(reader) not in busy:
                reader.stop()
                del self._readers[peer_id]


def _as_failure(task: ReadTask, cause: str) -> LoadFailure:
    return LoadFailure(transfer=task.transfer, num_valid_tokens=task.num_local_tokens, cause=cause)
