"""What the scheduler's half of a loopback connector tells the worker's half."""

from __future__ import annotations

import attrs

from pdcore.connector.base import KVLoad
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.messages import TransferKey

__all__ = ["LoopbackLoad", "LoopbackMeta"]


@attrs.frozen(kw_only=True, eq=False)
class LoopbackLoad:
    """One load to start: where from, and where to."""

    ticket: LoopbackTicket
    load: KVLoad


@attrs.frozen(kw_only=True, eq=False)
class LoopbackMeta:
    """One step's orders. An empty one only makes sure that the worker is asked for its report.

    Args:
        loads: to start.
        cancelled: nobody wants these any more.
        cut_off: to be ended by force.
    """

    loads: tuple[LoopbackLoad, ...] = ()
    cancelled: tuple[TransferKey, ...] = ()
    cut_off: tuple[TransferKey, ...] = ()
