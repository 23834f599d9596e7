"""The half of a combined connector that lives beside the model."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.multi.meta import MultiMeta
from pdcore.connector.multi.reports import join_reports
from pdcore.errors import TransferError
from pdcore.messages import TransferKey, TransferReport

__all__ = ["MultiWorkerConnector"]

logger = logging.getLogger(__name__)

_MAX_NUM_OWNERS = 4096


class MultiWorkerConnector(WorkerConnector):
    """Passes everything on to the workers' halves of several connectors.

    An error of one keeps no other from being called, and is raised after that. Two are only
    logged: those of `get_finished`, and those of `start_load_kv` of a connector that brings nothing
    that the step relies on. What it should have loaded ends at its deadline.

    Args:
        halves: by name, in order of preference.
    """

    def __init__(self, halves: Mapping[str, WorkerConnector]) -> None:
        self._halves = dict(halves)
        # Who brings the newest loads: what another one says of them is wrong.
        self._owners: OrderedDict[TransferKey, str] = OrderedDict()

    def register_kv_caches(self, caches: KVCaches) -> None:
        self._call_all(lambda name, half: half.register_kv_caches(caches))

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        """What each connector's peers must know, by name; None when that is nothing."""
        each = {name: half.get_handshake_metadata() for name, half in self._halves.items()}
        return each if any(metadata is not None for metadata in each.values()) else None

    def start_save_kv(self, meta: MultiMeta | None) -> None:
        """Let all save before any starts a load, which may overwrite what another one saves."""
        if meta is None:
            return
        parts = meta.parts

        def start(name: str, half: WorkerConnector) -> None:
            if name in parts:
                half.start_save_kv(parts[name])

        self._call_all(start)

    def start_load_kv(self, meta: MultiMeta | None) -> None:
        if meta is None:
            return
        self._note_owners(meta)

        def start(name: str, half: WorkerConnector) -> None:
            try:
                if name in meta.lost:
                    raise TransferError(
                        f"connector {name!r} has no orders for loads that this step relies on: "
                        f"{meta.lost[name]}"
                    )
                if name in meta.parts:
                    half.start_load_kv(meta.parts[name])
            except Exception:
                if name in meta.synchronous:
                    raise
                logger.exception(
                    "connector %r raised in start_load_kv(); its loads run to their deadline", name
                )

        self._call_all(start)

    def needs_layer_calls(self) -> bool:
        each = [half.needs_layer_calls() for half in self._halves.values()]
        return any(each)

    def wait_for_layer_load(self, layer: int) -> None:
        self._call_all(lambda name, half: half.wait_for_layer_load(layer))

    def save_kv_layer(self, layer: int) -> None:
        self._call_all(lambda name, half: half.save_kv_layer(layer))

    def wait_for_save(self) -> None:
        self._call_all(lambda name, half: half.wait_for_save())

    def get_finished(self) -> TransferReport:
        """One report of all, without what a connector says of loads that another one brings."""
        reports = {}
        for name, half in self._halves.items():
            try:
                reports[name] = self._own(name, half.get_finished())
            except Exception:
                logger.exception(
                    "connector %r raised in get_finished(); its loads run to their deadline", name
                )
        return join_reports(reports)

    def close(self) -> None:
        for name, half in self._halves.items():
            try:
                half.close()
            except Exception:
                logger.exception("connector %r raised in close()", name)

    def _call_all(self, call: Callable[[str, WorkerConnector], None]) -> None:
        """Call every half; raise the first error once all were called."""
        errors: list[Exception] = []
        for name, half in self._halves.items():
            try:
                call(name, half)
            except Exception as error:
                if errors:
                    logger.exception("connector %r raised too", name)
                errors.append(error)
        if errors:
            raise errors[0]

    def _note_owners(self, meta: MultiMeta) -> None:
        self._owners.update(meta.loads)
        while len(self._owners) > _MAX_NUM_OWNERS:
            self._owners.popitem(last=False)

    def _own(self, name: str, report: TransferReport) -> TransferReport:
        def is_own(transfer: TransferKey) -> bool:
            owner = self._owners.get(transfer, name)
            if owner != name:
                logger.error(
                    "connector %r reported load %s, which %r brings", name, transfer, owner
                )
            return owner == name

        return attrs.evolve(
            report,
            finished_recving=tuple(filter(is_own, report.finished_recving)),
            failed=tuple(failure for failure in report.failed if is_own(failure.transfer)),
        )
