"""Places in the life of a transfer at which a process stops itself, once, with SIGSTOP."""

from __future__ import annotations

import inspect
import signal
import threading
from typing import Any

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.handing_over import HandOverDesk
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.protocol import Accept, Claim, Describe, PushEnded, Renew
from pdcore.connector.nixl.push.landing_area import LandingArea
from pdcore.connector.nixl.push.landing_desk import LandingDesk

__all__ = ["STAGES", "stop_at"]

Stage = tuple[type, str, type | None]
"""A class, its method, and the kind of message that the method must have been given, if any."""

STAGES: dict[str, Stage] = {
    # A decode engine that reads.
    "asks for the handshake": (PeerLink, "describe", None),
    "renews": (PeerLink, "renew", None),
    "reads": (TransferAgent, "post_read", None),
    "asks to accept": (PeerLink, "accept", None),
    # A prefill engine that is read from.
    "answers the handshake": (HandOverDesk, "answer", Describe),
    "answers a renewal": (HandOverDesk, "answer", Renew),
    "accepts": (HandOverDesk, "answer", Accept),
    # A prefill engine that pushes.
    "claims": (PeerLink, "claim", None),
    "writes": (TransferAgent, "post_write", None),
    "tells the end": (PeerLink, "ask", PushEnded),
    # A decode engine that is written to.
    "answers a claim": (LandingDesk, "answer", Claim),
    "hears of the end": (LandingDesk, "answer", PushEnded),
    "copies": (LandingArea, "_copy", None),
}


def stop_at(name: str) -> None:
    """Have this process stop itself the first time that it comes to a place.

    Args:
        name: "before" or "after", and a stage.
    """
    when, _, stage = name.partition(" ")
    owner, method, kind = STAGES[stage]
    call = getattr(owner, method)
    stop = _Once(kind)
    if inspect.iscoroutinefunction(call):

        async def stopping(*arguments: Any, **options: Any) -> Any:
            if when == "before":
                stop(arguments)
            result = await call(*arguments, **options)
            if when == "after":
                stop(arguments)
            return result

    else:

        def stopping(*arguments: Any, **options: Any) -> Any:
            if when == "before":
                stop(arguments)
            result = call(*arguments, **options)
            if when == "after":
                stop(arguments)
            return result

    setattr(owner, method, stopping)


class _Once:
    """Stops the process when it is called for the first time with a message of a kind."""

    def __init__(self, kind: type | None) -> None:
        self._kind = kind
        self._is_done = False

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        is_kind = self._kind is None or any(isinstance(it, self._kind) for it in arguments)
        if is_kind and not self._is_done:
            self._is_done = True
            # To this very thread: one that is sent to the process lets it go on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
