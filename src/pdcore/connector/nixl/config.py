"""Settings of the NIXL connector."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from pdcore.checks import check_count, check_line, check_positive
from pdcore.connector.nixl import checked
from pdcore.connector.nixl.addresses import AllowedPeers, is_loopback, is_unspecified
from pdcore.errors import ConfigError

__all__ = ["NixlConfig"]

_MIN_KEY_BYTES = 16
# What parameters that peers send each other may say; see `TransferParams` and `PushParams`.
_MAX_BLOCK_SIZE = 1 << 20


def _as_patterns(patterns: Iterable[str] | None) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    if isinstance(patterns, str | bytes) or not isinstance(patterns, Iterable):
        raise ConfigError(f"allowed_peers={patterns!r:.80}: must be a list of patterns, or None")
    as_tuple = tuple(patterns)
    for place, pattern in enumerate(as_tuple):
        check_line(f"allowed_peers[{place}]", pattern, may_be_empty=True)
    return as_tuple


@attrs.frozen(kw_only=True)
class NixlConfig:
    """How an engine reaches its peers, and how long it bears with them.

    Args:
        block_size: tokens in a block, as the block pool has it. A peer's must be the same, or one
            a multiple of the other.
        engine_id: names this engine to its peers; empty lets the connector make one.
        host: where the side channel listens.
        port: its port; 0 takes a free one.
        advertised_host: what peers are told to connect to, when it is not ``host``. Needed if that
            stands for all interfaces (``0.0.0.0``).
        key: secret shared by all engines that may exchange KV, at least 16 bytes. Whoever has it
            can read and write the whole KV memory. Needed unless ``host`` is a loopback address.
            It keeps strangers out; it does not encrypt, so the network must be a trusted one.
        allowed_peers: which addresses transfer parameters may name: hosts, ``host:port``, networks
            (``10.0.0.0/8``) or name patterns (``*.cluster.local``). None means: any that a valid
            signature vouches for if there is a key, else loopback only.
        lease_s: how long a hand-over is kept without a sign of life from its reader; a day at most.
        request_timeout_s: how long a peer may take to answer one message.
        max_params_bytes: how large ``kv_transfer_params`` may be, as JSON.
        max_num_connections: how many peers' connections the side channel keeps at once; a further
            one takes the place of one that is idle. As many more may wait for a place, and as many
            may not have shown the key yet.
        max_connections_per_peer: how many it opens to one peer.
        load_poll_s: how often a loop that only waits for loads asks its workers all the same;
            they say when one ended, but what says it may get lost.
        busy_poll_s, idle_poll_s: how often a worker looks after those who read from it, while it
            knows of some and otherwise.
        stall_timeout_s: with reads from a peer in flight and none ending for so long, the peer is
            cut off and its loads fail. Must be longer than the longest read takes.
        idle_peer_timeout_s: without a read for so long, what was set up for a peer is let go.
        max_staging_bytes: how much host memory may hold the blocks of one peer of another shape on
            their way; taken only for such peers.
        push_staging_bytes: how much host memory of each rank takes what peers push before it is
            asked for; 0 takes no pushes. What does not fit is read as without pushes.
        doorbell_host: where an engine's scheduler half and its workers listen for each other.

    Raises:
        ConfigError: a setting is out of its range, or the host is reachable from outside and there
            is no key.
    """

    block_size: int
    engine_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str = ""
    key: bytes | None = attrs.field(default=None, repr=False)
    allowed_peers: tuple[str, ...] | None = attrs.field(default=None, converter=_as_patterns)
    lease_s: float = 30.0
    request_timeout_s: float = 5.0
    max_params_bytes: int = 1 << 20
    max_num_connections: int = 256
    max_connections_per_peer: int = 2
    load_poll_s: float = 0.01
    busy_poll_s: float = 0.0005
    idle_poll_s: float = 0.05
    stall_timeout_s: float = 30.0
    idle_peer_timeout_s: float = 300.0
    max_staging_bytes: int = 64 << 20
    push_staging_bytes: int = 0
    doorbell_host: str = "127.0.0.1"

    def __attrs_post_init__(self) -> None:
        for name in ("block_size", "max_params_bytes", "max_num_connections"):
            check_count(name, getattr(self, name))
        for name in ("max_connections_per_peer", "max_staging_bytes"):
            check_count(name, getattr(self, name))
        for name in ("lease_s", "request_timeout_s", "load_poll_s", "busy_poll_s"):
            check_positive(name, getattr(self, name))
        for name in ("idle_poll_s", "stall_timeout_s", "idle_peer_timeout_s"):
            check_positive(name, getattr(self, name))
        check_count("push_staging_bytes", self.push_staging_bytes, at_least=0)
        if self.block_size > _MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size={self.block_size}: must be at most {_MAX_BLOCK_SIZE}")
        if self.lease_s > checked.MAX_LEASE_S:
            raise ConfigError(f"lease_s={self.lease_s!r}: must be at most {checked.MAX_LEASE_S:g}")
        for name in ("engine_id", "advertised_host"):
            check_line(name, getattr(self, name), may_be_empty=True)
        for name in ("host", "doorbell_host"):
            check_line(name, getattr(self, name))
        check_count("port", self.port, at_least=0)
        if not self.port < 65536:
            raise ConfigError(f"port={self.port}: pass 1..65535, or 0 for a free one")
        self._check_key()
        if not self.advertised_host and is_unspecified(self.host):
            raise ConfigError(
                f"host={self.host!r} stands for all interfaces, and peers cannot connect to that: "
                "pass advertised_host as well, the address that they are to be told"
            )
        AllowedPeers(self.allowed_peers)

    def _check_key(self) -> None:
        if self.key is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, so a key is needed: "
                f"pass key=... (at least {_MIN_KEY_BYTES} random bytes, the same on every engine), "
                "or host='127.0.0.1'"
            )
        if self.key is not None and not isinstance(self.key, bytes):
            raise ConfigError(f"the key is a {type(self.key).__name__}: pass bytes")
        if self.key is not None and len(self.key) < _MIN_KEY_BYTES:
            raise ConfigError(
                f"the key has {len(self.key)} bytes: pass at least {_MIN_KEY_BYTES} random ones"
            )
