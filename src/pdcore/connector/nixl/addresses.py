"""Which addresses a decode engine may be sent to."""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Iterable

import attrs

from pdcore.errors import ConfigError

__all__ = ["AllowedPeers", "is_loopback", "is_unspecified"]


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by definition. Resolves no names."""
    address = _as_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_unspecified(host: str) -> bool:
    """Whether a host stands for all addresses of a machine, such as ``0.0.0.0``."""
    address = _as_address(host)
    return address is not None and address.is_unspecified


def _as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as the address that it is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@attrs.frozen
class _Pattern:
    host: str
    port: int | None
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None

    @classmethod
    def parse(cls, text: str) -> _Pattern:
        host, port = _split_port(text)
        try:
            return cls(host, port, ipaddress.ip_network(host))
        except ValueError:
            return cls(host, port, None)

    def matches(self, host: str, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        address = _as_address(host)
        if address is None:
            return self.network is None and fnmatch.fnmatchcase(host, self.host)
        # A name pattern such as "10.*" never matches an address: it would match the name
        # "10.evil.example" as well. Networks say what is meant: "10.0.0.0/8".
        return self.network is not None and address in self.network


def _split_port(text: str) -> tuple[str, int | None]:
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if text and (not colon or (":" in host and not is_bracketed)):
        return text, None
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"allowed_peers holds {text!r}: use host, host:port, a network such as 10.0.0.0/8, "
            "a name pattern such as *.cluster.local, or [v6 address]:port"
        )
    return (host[1:-1] if is_bracketed else host), int(port)


class AllowedPeers:
    """A list of addresses that this engine may connect to.

    Args:
        patterns: hosts, ``host:port`` pairs, networks (``10.0.0.0/8``) or name patterns
            (``*.cluster.local``). None allows loopback addresses alone.

    Raises:
        ConfigError: a pattern cannot be read.
    """

    def __init__(self, patterns: Iterable[str] | None = None) -> None:
        self._patterns = None if patterns is None else tuple(map(_Pattern.parse, patterns))

    @property
    def is_default(self) -> bool:
        """Whether no list was given."""
        return self._patterns is None

    def __contains__(self, address: tuple[str, int]) -> bool:
        host, port = address
        if self._patterns is None:
            return is_loopback(host)
        return any(pattern.matches(host, port) for pattern in self._patterns)
