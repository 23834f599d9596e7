"""What PD leans on, and how to do without, one at a time: a checker must miss each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from chaos_messages import EngineSettings, Timeouts

from pdcore.connector.base import ConnectorEvents
from pdcore.connector.nixl.push.landing import Landing, LandingState
from pdcore.connector.nixl.push.landings import LandingRegistry
from pdcore.connector.nixl.push.push import Push
from pdcore.connector.nixl.scheduler_side import NixlSchedulerConnector
from pdcore.connector.tickets import TicketAnswer, TicketRegistry
from pdcore.messages import TransferKey
from pdcore.request import Request
from pdcore.scheduler.base import RequestHandle
from pdcore.scheduler.core import Core
from pdcore.scheduler.unified import UnifiedScheduler

__all__ = ["PROTECTIONS", "Protection", "switched_off"]

_NEVER_S = 86400.0


@attrs.frozen(kw_only=True)
class Protection:
    """One protection.

    Args:
        what: it does.
        signs: the kinds of findings by which its absence may show.
        without: makes an engine that is built in its block do without.
    """

    what: str
    signs: tuple[str, ...]
    without: Callable[[EngineSettings], Any]


@contextmanager
def switched_off(settings: EngineSettings) -> Iterator[EngineSettings]:
    """Switch off what the settings say, for the length of a block; yields the settings to use."""
    if not settings.protection_off:
        yield settings
        return
    with PROTECTIONS[settings.protection_off].without(settings) as changed:
        yield changed


@contextmanager
def _replaced(owner: type, name: str, substitute: Any) -> Iterator[None]:
    original = getattr(owner, name)  # a name that is gone must not pass for a protection
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _accepting_anything(settings: EngineSettings) -> Iterator[EngineSettings]:
    accept = TicketRegistry.accept

    def vouch(
        registry: TicketRegistry,
        transfer_id: str,
        contents_digest: str,
        *,
        consumer: str,
    ) -> TicketAnswer:
        accept(registry, transfer_id, contents_digest, consumer=consumer)
        return TicketAnswer(True)

    with _replaced(TicketRegistry, "accept", vouch):
        yield settings


@contextmanager
def _without_quarantine(settings: EngineSettings) -> Iterator[EngineSettings]:
    def only_cancel(core: Core, transfer: TransferKey, block_ids: Any) -> None:
        assert core.connector is not None
        core.connector.cancel(transfer)

    with _replaced(Core, "_quarantine", only_cancel):
        yield settings


@contextmanager
def _completions_after_admission(settings: EngineSettings) -> Iterator[EngineSettings]:
    """Completions are looked at once the queue is through, so a head that does not fit hides
    them."""
    take_events = NixlSchedulerConnector.take_events
    schedulers: list[UnifiedScheduler] = []
    begin = UnifiedScheduler.__init__

    def remember(scheduler: UnifiedScheduler, *args: Any, **options: Any) -> None:
        begin(scheduler, *args, **options)
        schedulers.append(scheduler)

    def take_if_none_waits(connector: NixlSchedulerConnector) -> ConnectorEvents:
        if any(scheduler.stats().num_waiting for scheduler in schedulers):
            return ConnectorEvents()
        return take_events(connector)

    with (
        _replaced(UnifiedScheduler, "__init__", remember),
        _replaced(NixlSchedulerConnector, "take_events", take_if_none_waits),
    ):
        yield settings


@contextmanager
def _without_deadlines(settings: EngineSettings) -> Iterator[EngineSettings]:
    never = {field.name: _NEVER_S for field in attrs.fields(Timeouts)}
    yield attrs.evolve(settings, timeouts=Timeouts(**never))


@contextmanager
def _request_ids_as_uids(settings: EngineSettings) -> Iterator[EngineSettings]:
    """A transfer is named by its request's id: a reused id gets its former self's name."""
    add_request = UnifiedScheduler.add_request
    uids: dict[str, int] = {}

    def add(scheduler: UnifiedScheduler, request: Request) -> RequestHandle:
        uid = uids.setdefault(request.request_id, len(uids) + 1)
        scheduler._arrivals._num_added = uid - 1
        handle = add_request(scheduler, request)
        assert handle.uid == uid
        return handle

    with _replaced(UnifiedScheduler, "add_request", add):
        yield settings


@contextmanager
def _reusing_slots(settings: EngineSettings) -> Iterator[EngineSettings]:
    drop = LandingRegistry._drop

    def free_at_once(registry: LandingRegistry, landing: Landing) -> None:
        if landing.state is LandingState.CLAIMED:
            registry._free_slots(landing)
        else:
            drop(registry, landing)

    with _replaced(LandingRegistry, "_drop", free_at_once):
        yield settings


@contextmanager
def _vouching_for_all_slots(settings: EngineSettings) -> Iterator[EngineSettings]:
    with _replaced(Push, "num_vouched", lambda push: len(push.params.slots)):
        yield settings


PROTECTIONS = {
    "accept": Protection(
        what="P vouches for a read: its lease never lapsed, its blocks are the ticket's",
        signs=("wrong token",),
        without=_accepting_anything,
    ),
    "quarantine": Protection(
        what="blocks that a cancelled read may still write to are not given out",
        signs=("wrong token",),
        without=_without_quarantine,
    ),
    "completions": Protection(
        what="completions are taken in before admission and apart from it",
        signs=("hang", "leak"),
        without=_completions_after_admission,
    ),
    "deadlines": Protection(
        what="every wait for the outside ends",
        signs=("hang", "leak"),
        without=_without_deadlines,
    ),
    "uid": Protection(
        what="a transfer is named by its request's life, not by its id",
        signs=("wrong token", "hang", "leak", "dead engine", "untrue reason"),
        without=_request_ids_as_uids,
    ),
    "slots": Protection(
        what="a slot for pushes is not given out while somebody may still write to it",
        signs=("wrong token",),
        without=_reusing_slots,
    ),
    "vouching": Protection(
        what="P vouches for a pushed block only if it was held, complete, and has arrived",
        signs=("wrong token",),
        without=_vouching_for_all_slots,
    ),
}
