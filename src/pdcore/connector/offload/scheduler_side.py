"""The offload connector's half beside the scheduler: it knows what is saved, and where."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.checks import check_all_ranks
from pdcore.clock import Clock, MonotonicClock
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVLoad,
    SchedulerConnector,
)
from pdcore.connector.block_count import BlockCount
from pdcore.connector.load_tally import LoadTally
from pdcore.connector.offload.catalog import Catalog
from pdcore.connector.offload.config import OffloadConfig
from pdcore.connector.offload.meta import (
    LoadOrder,
    OffloadHandshake,
    OffloadMeta,
    Place,
    SaveOrder,
)
from pdcore.connector.offload.records import MAX_KEY_BYTES
from pdcore.connector.stats import ConnectorStats, OffloadCounts
from pdcore.errors import ConfigError, InvariantBroken, TransferError
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import LoadFailure, SchedulerOutput, TransferKey, TransferReport
from pdcore.request import Request

__all__ = ["OffloadSchedulerConnector"]

logger = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int32]

_NOTHING = ExternalMatch(num_tokens=0)


@attrs.define(eq=False)
class _Load:
    """A load that has not ended; its places are pinned."""

    order: LoadOrder
    is_sent: bool = False
    is_cancelled: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        return self.order.places


@attrs.define(eq=False)
class _Counts:
    num_saved: int = 0
    num_loaded_from_host: int = 0
    num_loaded_from_disk: int = 0
    num_lost: int = 0


class OffloadSchedulerConnector(SchedulerConnector):
    """Decides what is saved and loaded. Made by `OffloadConnector.scheduler_side`."""

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__()
        self._config = config
        self._clock: Clock = MonotonicClock()
        self._manager: KVCacheManager | None = None
        self._catalog: Catalog | None = None
        self._block_count = BlockCount()
        # By identity: an id may be used again. The keys of a prompt, once they were asked for.
        self._keys: dict[Request, list[bytes]] = {}
        # Written, not saved yet, and not handed out again by any plan so far: key -> block.
        self._unsaved: dict[bytes, int] = {}
        self._lost_saves: dict[int, SaveOrder] = {}
        self._loads: dict[TransferKey, _Load] = {}
        self._cancelled: list[TransferKey] = []
        self._num_resets = 0
        self._has_warned = False
        self._is_reset_told = True
        self._poll_at = 0.0
        self._counts = _Counts()
        self._tally = LoadTally()

    def start(self, *, clock: Clock, notify: Callable[[], None]) -> None:
        self._clock = clock

    def bind_kv_manager(self, manager: KVCacheManager) -> None:
        hasher = manager.hasher
        if not manager.enable_prefix_caching:
            raise ConfigError(
                "blocks are saved under the names that the prefix cache gives them: give the "
                "KVCacheManager enable_prefix_caching=True"
            )
        if self._config.persistent and not hasher.is_lasting:
            raise ConfigError(
                "persistent=True needs names that the next engine gives as well: give the "
                "KVCacheManager a hasher=PrefixHasher(block_size, secret=...) with a kept secret"
            )
        if len(hasher.root(None, None)) > MAX_KEY_BYTES:
            raise ConfigError(f"the hasher's keys have more than {MAX_KEY_BYTES} bytes")
        self._block_count.of_pool(manager.pool.num_blocks)
        self._manager = manager
        manager.pool.subscribe(self._committed)

    def set_xfer_handshake_metadata(self, metadata: list[OffloadHandshake | None]) -> None:
        ranks = check_all_ranks(metadata, mend="initialise the model runner of every rank first")
        self._block_count.of_ranks(handshake.num_blocks for handshake in ranks)
        self._catalog = Catalog(ranks)

    def reset_cache(self) -> None:
        # Records of before are void, where they are; so what is in flight need not be called back.
        self._num_resets += 1
        self._is_reset_told = False
        self._unsaved.clear()
        self._lost_saves.clear()
        if self._catalog is not None:
            self._catalog.clear()

    def request_added(self, request: Request, uid: int) -> None:
        if self._catalog is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "nothing is saved or loaded before set_xfer_handshake_metadata: pass it what each "
                "worker's get_handshake_metadata returned"
            )

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        places = self._find(request, num_local_tokens)
        if not places:
            return _NOTHING
        return ExternalMatch(
            num_tokens=len(places) * self._block_size,
            is_async=True,
            load_s=self._load_s(places),
        )

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        assert self._catalog is not None
        places = tuple(self._find(request, load.num_local_tokens)[: load.block_ids.size])
        if len(places) < load.block_ids.size:
            raise TransferError(
                f"a load of {load.block_ids.size} blocks was asked for, {len(places)} are saved"
            )
        order = LoadOrder(
            transfer=load.transfer,
            num_local_tokens=load.num_local_tokens,
            block_size=self._block_size,
            block_ids=tuple(load.block_ids.tolist()),
            places=places,
        )
        self._catalog.pin(places)
        self._loads[load.transfer] = _Load(order)
        self._tally.started()

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        undone = self._loads.pop(load.transfer, None)
        if undone is not None and self._catalog is not None:
            self._catalog.unpin(undone.places)
            self._tally.undone()

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMeta | None:
        saves = self._take_saves()
        unsent = [load for load in self._loads.values() if not load.is_sent]
        for load in unsent:
            load.is_sent = True
        cancelled, self._cancelled = self._cancelled, []
        if not (saves or self._loads) and self._is_reset_told:
            return None
        self._is_reset_told = True
        # While a load is in flight even an empty order goes out: workers report in steps alone.
        return OffloadMeta(
            num_resets=self._num_resets,
            saves=saves,
            loads=tuple(load.order for load in unsent),
            cancelled=tuple(cancelled),
        )

    def rebuild_connector_meta(self, meta: OffloadMeta) -> None:
        if meta.num_resets:
            # Perhaps it was the one that told of the last reset.
            self._is_reset_told = False
        if meta.num_resets == self._num_resets:
            # No worker wrote anything since, so the blocks are as they were.
            self._lost_saves = {order.host_slot: order for order in meta.saves} | self._lost_saves
        for order in meta.loads:
            load = self._loads.get(order.transfer)
            if load is not None and not load.is_cancelled:
                load.is_sent = False
        self._cancelled[:0] = meta.cancelled

    def step_failed(self, meta: OffloadMeta) -> None:
        # A lost save is found out when it is loaded; a lost reset or cancellation is not.
        if meta.num_resets:
            self._is_reset_told = False
        self._cancelled[:0] = [transfer for transfer in meta.cancelled if transfer in self._loads]

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        keys = self._keys.pop(request, None)
        if keys is not None and self._catalog is not None:
            self._catalog.touch(keys)
        return None

    def cancel(self, transfer: TransferKey) -> None:
        load = self._loads.get(transfer)
        if load is None:
            return
        load.is_cancelled = True
        if load.is_sent:
            # Its order may have been lost with a failed step: the worker answers all the same.
            self._cancelled.append(transfer)
            return
        failure = LoadFailure(
            transfer=transfer,
            num_valid_tokens=load.order.num_local_tokens,
            cause="the load was cancelled",
        )
        self.update_connector_output(TransferReport(failed=(failure,)))

    def cut_off(self, transfer: TransferKey) -> None:
        self.cancel(transfer)

    def update_connector_output(self, report: TransferReport) -> None:
        """Take the workers' report; what nobody waits for goes no further."""
        for stats in report.measured:
            self._tally.measured(stats)
        finished = [key for key in report.finished_recving if self._take_ended(key, None)]
        failed = [it for it in report.failed if self._take_ended(it.transfer, it)]
        super().update_connector_output(
            TransferReport(finished_recving=tuple(finished), failed=tuple(failed))
        )

    def take_events(self) -> ConnectorEvents:
        self._poll_at = self._clock.now() + self._config.poll_s
        return super().take_events()

    def next_wakeup(self) -> float | None:
        if self._reports or self._has_orders:
            return self._clock.now()
        return self._poll_at if self._loads else None

    def has_pending(self) -> bool:
        return bool(self._loads or self._reports or self._has_orders)

    def explain(self, request: Request) -> str | None:
        return "its KV from host memory or disk"

    def stats(self) -> ConnectorStats:
        catalog, counts = self._catalog, self._counts
        return ConnectorStats(
            loads=self._tally.counts(),
            transfers=self._tally.transfers(),
            offload=OffloadCounts(
                num_in_host=0 if catalog is None else len(catalog.host),
                num_on_disk=0 if catalog is None else len(catalog.disk),
                **attrs.asdict(counts),
            ),
        )

    def check(self) -> None:
        """Audit; raises `InvariantBroken`. For tests."""
        if self._catalog is not None:
            self._catalog.check()
            pins = {(it.is_on_disk, it.slot) for load in self._loads.values() for it in load.places}
            if len(pins) != self._catalog.num_pinned:
                raise InvariantBroken(
                    f"{self._catalog.num_pinned} slots are pinned, {len(pins)} are loaded from"
                )

    @property
    def _block_size(self) -> int:
        assert self._manager is not None
        return self._manager.block_size

    @property
    def _has_orders(self) -> bool:
        """Whether something waits for the next step."""
        return bool(
            self._unsaved
            or self._lost_saves
            or self._cancelled
            or not self._is_reset_told
            or any(not load.is_sent for load in self._loads.values())
        )

    def _committed(self, block_ids: BlockIds, keys: list[bytes]) -> None:
        """Blocks were written. The next plan is the first that may give them away, so their orders
        go with it, and are carried out before it writes."""
        catalog = self._catalog
        if catalog is None:
            return
        catalog.touch(keys)
        for block, key in zip(block_ids.tolist(), keys, strict=True):
            if key not in catalog.host:
                self._unsaved[key] = block

    def _take_saves(self) -> tuple[SaveOrder, ...]:
        if self._catalog is None or not (self._unsaved or self._lost_saves):
            return ()
        unsaved, self._unsaved = self._unsaved, {}
        lost, self._lost_saves = self._lost_saves, {}
        fresh = self._catalog.save(unsaved)
        self._counts.num_saved += len(fresh)
        return tuple((lost | fresh).values())

    def _find(self, request: Request, num_local_tokens: int) -> list[Place]:
        """Where the blocks of a prompt behind its local ones are; the last token is left out."""
        if self._catalog is None:
            return []
        start = num_local_tokens // self._block_size
        end = (request.num_prompt_tokens - 1) // self._block_size
        return self._catalog.places(self._keys_of(request)[start:end])

    def _keys_of(self, request: Request) -> list[bytes]:
        keys = self._keys.get(request)
        if keys is None:
            assert self._manager is not None
            hasher = self._manager.hasher
            root = hasher.root(request.cache_salt, request.lora)
            keys = hasher.chain(root, request.prompt_token_ids, start=0)
            self._keys[request] = keys
        return keys

    def _load_s(self, places: Sequence[Place]) -> float:
        assert self._catalog is not None
        num_on_disk = sum(place.is_on_disk for place in places)
        seconds = len(places) / self._config.host_bytes_per_s
        seconds += num_on_disk / self._config.disk_bytes_per_s
        return seconds * self._catalog.bytes_per_block

    def _take_ended(self, transfer: TransferKey, failure: LoadFailure | None) -> bool:
        """Take in the end of a load; return whether anybody waits for it."""
        load = self._loads.pop(transfer, None)
        self._tally.reported(transfer, is_awaited=load is not None)
        if load is None or self._catalog is None:
            return False
        places = load.places
        self._tally.ended(transfer, is_good=failure is None, is_cancelled=load.is_cancelled)
        self._catalog.unpin(places)
        if failure is None:
            num_on_disk = sum(place.is_on_disk for place in places)
            self._counts.num_loaded_from_disk += num_on_disk
            self._counts.num_loaded_from_host += len(places) - num_on_disk
        elif not load.is_cancelled:
            self._forget_lost(load.order, failure)
        return True

    def _forget_lost(self, order: LoadOrder, failure: LoadFailure) -> None:
        """What came before the first bad record is good. Those of its tier that come behind it are
        of no use without it, so they are saved anew with it."""
        num_valid = (failure.num_valid_tokens - order.num_local_tokens) // order.block_size
        rest = order.places[max(num_valid, 0) :]
        lost = [place for place in rest if place.is_on_disk == rest[0].is_on_disk]
        self._counts.num_lost += len(lost)
        assert self._catalog is not None
        self._catalog.forget(lost)
