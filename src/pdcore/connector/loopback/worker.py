"""The worker's half of a loopback connector: it copies blocks from a peer's KV memory."""

from __future__ import annotations

import logging
from typing import Any

import attrs

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.loopback.fabric import LoopbackEngine, LoopbackFabric
from pdcore.connector.loopback.faults import LoopbackFaults
from pdcore.connector.loopback.meta import LoopbackLoad, LoopbackMeta
from pdcore.errors import HandshakeRefused, PeerLost, TransferError
from pdcore.messages import LoadFailure, TransferKey, TransferReport

__all__ = ["LoopbackWorkerConnector"]

logger = logging.getLogger(__name__)

Outcome = TransferKey | LoadFailure
"""How a load ended: its key when all is there, or what failed."""


@attrs.define(eq=False, kw_only=True)
class _Transfer:
    """A load in flight."""

    order: LoopbackLoad
    faults: LoopbackFaults
    due_s: float
    num_polls: int = 0
    is_cancelled: bool = False
    has_landed: bool = False

    @property
    def key(self) -> TransferKey:
        return self.order.load.transfer

    @property
    def next_due_s(self) -> float | None:
        """When polling it makes sense; None when it will never report."""
        return None if self.faults.lose else self.due_s

    @property
    def num_tokens(self) -> int:
        """How many tokens from the start of the prompt are to be there in the end."""
        return self.order.load.num_local_tokens + self.order.load.num_external_tokens

    @property
    def num_landing_tokens(self) -> int:
        """How many of them will be: fewer than ``num_tokens`` when the load is to fail."""
        if self.faults.num_valid_tokens is None:
            return self.num_tokens
        valid = max(self.faults.num_valid_tokens, self.order.load.num_local_tokens)
        return min(valid, self.num_tokens)

    def failed(self, cause: str, *, num_valid_tokens: int | None = None) -> LoadFailure:
        local = self.order.load.num_local_tokens
        return LoadFailure(
            transfer=self.key,
            num_valid_tokens=local if num_valid_tokens is None else num_valid_tokens,
            cause=cause,
        )


class LoopbackWorkerConnector(WorkerConnector):
    """Moves blocks when it is asked for its report, so that every run is repeatable.

    Made by `LoopbackConnector.worker_side`.
    """

    def __init__(self, fabric: LoopbackFabric, engine: LoopbackEngine) -> None:
        self._fabric = fabric
        self._engine = engine
        self._caches: KVCaches | None = None
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._repeated: list[Outcome] = []

    def register_kv_caches(self, caches: KVCaches) -> None:
        self._engine.block_count.of_ranks([caches.num_blocks])
        self._caches = caches
        self._engine.caches = caches

    def start_load_kv(self, meta: Any) -> None:
        if not isinstance(meta, LoopbackMeta):
            return
        for order in meta.loads:
            self._start(order)
        for transfer in self._known(meta.cancelled):
            self._cancel(transfer, late_write=transfer.faults.late_write)
        for transfer in self._known(meta.cut_off):
            self._cancel(transfer, late_write=False)
        # An order that was lost with a step that failed: nothing writes, so it ends at once.
        self._repeated += [
            LoadFailure(transfer=key, num_valid_tokens=0, cause="the load was cancelled")
            for key in (*meta.cancelled, *meta.cut_off)
            if key not in self._transfers
        ]

    def get_finished(self) -> TransferReport:
        ended: list[tuple[_Transfer, Outcome]] = []
        for transfer in list(self._transfers.values()):
            outcome = self._poll(transfer)
            if outcome is not None:
                ended.append((transfer, outcome))
        if any(transfer.faults.reorder for transfer, _ in ended):
            ended.reverse()
        outcomes = self._repeated + [outcome for _, outcome in ended]
        self._repeated = [outcome for transfer, outcome in ended if transfer.faults.duplicate]
        for transfer, _ in ended:
            del self._transfers[transfer.key]
            self._fabric.clear_due(self._engine, transfer.key)
        return TransferReport(
            finished_recving=tuple(o for o in outcomes if isinstance(o, TransferKey)),
            failed=tuple(o for o in outcomes if isinstance(o, LoadFailure)),
        )

    def close(self) -> None:
        self._transfers.clear()
        self._repeated.clear()
        self._caches = None
        self._engine.caches = None

    def _start(self, order: LoopbackLoad) -> None:
        faults = self._fabric.choose_faults(order.load)
        due_s = self._fabric.clock.now() + faults.delay_s
        transfer = _Transfer(order=order, faults=faults, due_s=due_s)
        self._transfers[transfer.key] = transfer
        self._fabric.set_due(self._engine, transfer.key, transfer.next_due_s)

    def _known(self, keys: tuple[TransferKey, ...]) -> list[_Transfer]:
        return [self._transfers[key] for key in keys if key in self._transfers]

    def _cancel(self, transfer: _Transfer, *, late_write: bool) -> None:
        transfer.is_cancelled = True
        transfer.faults = attrs.evolve(transfer.faults, late_write=late_write)
        due = transfer.next_due_s if late_write else self._fabric.clock.now()
        self._fabric.set_due(self._engine, transfer.key, due)

    def _poll(self, transfer: _Transfer) -> Outcome | None:
        """Move a transfer on by one poll; return how it ended, or None while it goes on."""
        transfer.num_polls += 1
        if transfer.is_cancelled and not transfer.faults.late_write:
            return transfer.failed("the load was cancelled")
        try:
            source = self._source(transfer.order)
        except TransferError as error:
            return transfer.failed(str(error))
        is_due = (
            transfer.num_polls > transfer.faults.delay_polls
            and self._fabric.clock.now() >= transfer.due_s
        )
        if not is_due:
            return None
        if transfer.faults.fail is not None:
            return transfer.failed(transfer.faults.fail)
        if not transfer.has_landed:
            self._land(transfer, source)
        if transfer.faults.lose:
            return None
        return self._landed_outcome(transfer)

    def _landed_outcome(self, transfer: _Transfer) -> Outcome:
        num_valid = transfer.num_landing_tokens
        if num_valid < transfer.num_tokens:
            return transfer.failed(
                f"only {num_valid} of {transfer.num_tokens} tokens arrived",
                num_valid_tokens=num_valid,
            )
        return transfer.key

    def _source(self, order: LoopbackLoad) -> KVCaches:
        """The peer's memory; raises `TransferError` when it may not or cannot be read."""
        source, target = self._fabric.peer(order.ticket).caches, self._caches
        if source is None or target is None:
            raise PeerLost(f"engine {order.ticket.engine_id!r} or this one has no KV memory now")
        if source.fingerprint != target.fingerprint:
            raise HandshakeRefused(
                f"engine {order.ticket.engine_id!r} has KV of {source.fingerprint!r}, this one of "
                f"{target.fingerprint!r}: both must run the same model, dtype and block size"
            )
        if max(order.ticket.block_ids) >= source.num_blocks:
            raise HandshakeRefused(
                f"the ticket names block {max(order.ticket.block_ids)}, engine "
                f"{order.ticket.engine_id!r} has {source.num_blocks}"
            )
        return source

    def _land(self, transfer: _Transfer, source: KVCaches) -> None:
        """Copy the blocks by position: the first target block takes the first missing token."""
        load, ticket = transfer.order.load, transfer.order.ticket
        first = load.num_local_tokens // ticket.block_size
        stop = -(-transfer.num_landing_tokens // ticket.block_size)
        targets = load.block_ids[: stop - first].tolist()
        target_caches = self._caches
        if targets and target_caches is not None:
            sources = list(ticket.block_ids[first:stop])
            # Lists index numpy arrays and torch tensors alike.
            target_caches.buffer[targets] = source.buffer[sources]
        transfer.has_landed = True
        logger.debug("load %s: %d blocks landed", transfer.key, len(targets))
