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
            if _is_name(host):
                return cls(host, port, None)
        raise _unreadable(text)

    def matches(self, host: str, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        address = _as_address(host)
        if address is None:
            return self.network is None and fnmatch.fnmatchcase(host, self.host)
        # A name pattern never matches an address, nor a network a name such as
        # "10.evil.example": what is meant must be said.
        return self.network is not None and address in self.network


def _split_port(text: str) -> tuple[str, int | None]:
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if text and (not colon or (":" in host and not is_bracketed)):
        return text, None
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _unreadable(text)
    return (host[1:-1] if is_bracketed else host), int(port)


def _is_name(host: str) -> bool:
    """Whether a pattern can match a name, rather than being an address or a network gone wrong."""
    return "/" not in host and ":" not in host and not host.replace(".", "").rstrip("*?").isdigit()


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"allowed_peers holds {text!r}, which matches no address: use host, host:port, a network "
        "such as 10.0.0.0/8 (its address, without a host's bits), a name pattern such as "
        "*.cluster.local, or [v6 address]:port"
    )


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
