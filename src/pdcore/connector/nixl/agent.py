"""A NIXL agent with one registered region: the only place that touches the NIXL library.

The rules that hold here were measured, not read (NIXL 1.5.1, UCX 1.23):

* Two threads inside one agent crash the process unless it synchronises strictly. Each agent here
  belongs to one thread and is strict all the same.
* Releasing a transfer that is in flight does not stop it. Only destroying the agent does.
* Deregistering memory while lists or handles of it exist crashes the process.
* After any failure at a peer, everything to that peer fails until it is removed and added again.
* Over TCP, a process that was stopped while one of its readers went away may be aborted by UCX when
  it goes on ("unexpected error: Endpoint timeout"). One that runs survives its readers' deaths.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.errors import MissingExtra, PeerLost

__all__ = ["TransferAgent", "load_nixl"]

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "WARN",  # otherwise every agent prints two lines to standard output
    "UCX_LOG_LEVEL": "fatal",  # failures reach us as errors; UCX would print them as well
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # bounds the memory that UCX keeps registered
}

_ERROR_NAMES = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)


@cache
def load_nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """Import NIXL; return its module and the errors that it raises, which have no common base.

    Sets defaults for three environment variables that NIXL and UCX read once, at import.

    Raises:
        MissingExtra: NIXL is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raise_exceptions = logging.raiseExceptions
    try:
        module = importlib.import_module("nixl._api")
        bindings = importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise MissingExtra("pdcore.NixlConnector", "nixl", error.name or "nixl") from error
    finally:
        logging.raiseExceptions = raise_exceptions  # NIXL's import turns it off for everybody
    return module, tuple(getattr(bindings, name) for name in _ERROR_NAMES)


@contextmanager
def _as_peer_lost(what: str) -> Iterator[None]:
    """Turn any of NIXL's errors into `PeerLost`; their messages are bare code names.

    Keep the words of what this raises, not the exception: its traceback holds handles of the
    agent, and with them the transfers that destroying the agent must stop.
    """
    _, errors = load_nixl()
    try:
        yield
    except errors as error:
        raise PeerLost(f"{what} ({type(error).__name__})") from None


class TransferAgent:
    """One NIXL agent, one registered region, and at most one remote one to read or write.

    One thread owns it. An agent for each peer costs about 5 MB, 15 file descriptors and 0.1 s, and
    buys that cutting one peer off harms no other.

    Args:
        region: the local memory.

    Raises:
        MissingExtra: NIXL is not installed.
        PeerLost: the UCX backend does not start (for instance, there is no network interface).
    """

    def __init__(self, region: MemoryRegion) -> None:
        module, _ = load_nixl()
        self.name = str(uuid.uuid4())
        self._region = region
        self._remote_name: bytes | str = ""
        self._remote: Any = None
        self._agent: Any = None
        config = module.nixl_agent_config(
            # Its thread spins on a core, idle or not; the owner polls and sleeps instead.
            enable_prog_thread=False,
            sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            backends=[],
        )
        with _as_peer_lost("NIXL could not start its UCX backend or register the KV memory"):
            agent = module.nixl_agent(self.name, config)
            agent.create_backend("UCX", {})
            self._registered = agent.register_memory(
                region.registration(), region.mem_type, backends=["UCX"]
            )
            self._local = agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", region.descriptors(), region.mem_type, backends=["UCX"]
            )
            self._agent = agent

    def metadata(self) -> bytes:
        """What a peer's agent needs to reach this one's memory: addresses and memory keys."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes, region: MemoryRegion) -> None:
        """Make a peer's region readable.

        Raises:
            PeerLost: the peer is not there, or its metadata is unusable.
        """
        with _as_peer_lost("NIXL could not reach the peer's agent"):
            self._remote_name = self._agent.add_remote_agent(metadata)
            self._remote = self._agent.prep_xfer_dlist(
                self._remote_name, region.descriptors(), region.mem_type, backends=["UCX"]
            )

    def post_read(
        self, local_ids: npt.NDArray[np.int32], remote_ids: npt.NDArray[np.int32]
    ) -> tuple[Any, bool]:
        """Start reading remote blocks into local ones, pairwise; see `_post`.

        Raises:
            PeerLost: the peer is gone. Parts of the data may have landed.
        """
        return self._post("READ", local_ids, remote_ids)

    def post_write(
        self, local_ids: npt.NDArray[np.int32], remote_ids: npt.NDArray[np.int32]
    ) -> tuple[Any, bool]:
        """Start writing local blocks into remote ones, pairwise; see `_post`.

        Raises:
            PeerLost: the peer is gone. Parts of the data may have landed there.
        """
        return self._post("WRITE", local_ids, remote_ids)

    def _post(
        self,
        operation: str,
        local_ids: npt.NDArray[np.int32],
        remote_ids: npt.NDArray[np.int32],
    ) -> tuple[Any, bool]:
        """Start moving blocks.

        On one host the call itself copies, at memory speed, with the interpreter's lock released.
        Neighbours in both lists that are adjacent on both sides are moved as one piece.

        Returns:
            The handle for `poll`, and whether the move is done already.
        """
        with _as_peer_lost(f"the {operation.lower()} failed"):
            handle = self._agent.make_prepped_xfer(
                operation, self._local, local_ids, self._remote, remote_ids, b"", backends=["UCX"]
            )
            return handle, self._is_done(self._agent.transfer(handle))

    def poll(self, handle: Any) -> bool:
        """Whether a move is done. Nothing moves on a network unless somebody polls.

        Raises:
            PeerLost: it failed. Parts of the data may have landed.
        """
        with _as_peer_lost("the transfer failed"):
            return self._is_done(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Let go of a finished move's handle."""
        with _as_peer_lost("NIXL could not release a finished transfer"):
            self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Let peers get on that read from this agent, or write: they need its answers to end."""
        with _as_peer_lost("NIXL could not make progress"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Let go of the peer and the memory, in the order that does not crash. Idempotent.

        Every handle must have been released before. Nothing may be in flight: see `destroy`.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        _, errors = load_nixl()
        try:
            self._release_lists(agent)
            agent.deregister_memory(self._registered, backends=["UCX"])
        except errors as error:
            logger.warning("NIXL agent %s did not close cleanly: %s", self.name, error)

    def destroy(self, handles: list[Any]) -> None:
        """Stop every transfer by force, and empty ``handles``. Idempotent.

        Once it returns, nothing is written to local memory any more, provided that the caller
        keeps no handle of this agent. Takes about 0.2 s when transfers are in flight.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        _, errors = load_nixl()
        try:
            for handle in handles:
                agent.release_xfer_handle(handle)
            self._release_lists(agent)
        except errors as error:
            logger.warning("NIXL agent %s was destroyed uncleanly: %s", self.name, error)
        # Memory stays registered: deregistering it under a transfer crashes. The destructor,
        # which runs when these last references go, stops the transfers first.
        handles.clear()
        self._registered = None

    def _release_lists(self, agent: Any) -> None:
        remote, self._remote = self._remote, None
        local, self._local = self._local, None
        if remote is not None:
            remote.release()
        if local is not None:
            local.release()
        if self._remote_name:
            agent.remove_remote_agent(self._remote_name)
            self._remote_name = ""

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise PeerLost("the transfer failed")
        return state == "DONE"
