"""Settings, start and end of a scheduler half."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from nixl_halves import Half, half

from pdcore.clock import MonotonicClock
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.connector.nixl.server import SideChannelServer, bind
from pdcore.errors import AddressInUse, ConfigError


def test_a_taken_port_is_named(prefill: Half) -> None:
    """Starting on a port in use is an error that names the address and the way out."""
    port = prefill.connector.address[1]
    with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}: another process does"):
        Half(port=port)


def test_a_start_waits_for_no_peer() -> None:
    """The timeout of messages to peers is none for the connector's own thread."""
    with half(request_timeout_s=1e-6) as made:
        assert made.connector.address[1] > 0


def test_a_start_that_failed_leaves_nothing_and_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever goes wrong on the way, thread and port are free again, and the next start works."""
    connector = NixlConnector(NixlConfig(block_size=4)).scheduler_side()
    ports = []

    async def fail(server: SideChannelServer) -> None:
        ports.append(server._listener.getsockname()[1])
        raise OSError("no more files")

    monkeypatch.setattr(SideChannelServer, "start", fail)
    with pytest.raises(OSError, match="no more files"):
        connector.start(clock=MonotonicClock(), notify=lambda: None)
    assert "pdcore-nixl-control" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConfigError, match="call start"):
        connector.take_events()
    bind("127.0.0.1", ports[0]).close()
    monkeypatch.undo()
    connector.start(clock=MonotonicClock(), notify=lambda: None)
    connector.close()


def test_close_twice_joins_the_thread() -> None:
    """Closing leaves no thread behind and may be repeated."""
    made = Half()
    made.connector.close()
    made.connector.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "pdcore-nixl-control" not in names


def test_close_without_start() -> None:
    """A connector that was never started can be closed."""
    NixlConnector(NixlConfig(block_size=4)).scheduler_side().close()


def test_use_before_start_is_an_error_that_says_so() -> None:
    """Calling a connector that was not started names the missing call."""
    connector = NixlConnector(NixlConfig(block_size=4)).scheduler_side()
    with pytest.raises(ConfigError, match="call start"):
        connector.take_events()
    connector.close()


def test_a_key_is_needed_off_loopback() -> None:
    """Listening where others can connect needs a key, and a long one."""
    with pytest.raises(ConfigError, match="so a key is needed"):
        NixlConfig(block_size=4, host="0.0.0.0")
    with pytest.raises(ConfigError, match="at least 16"):
        NixlConfig(block_size=4, key=b"short")
    assert NixlConfig(block_size=4, host="10.0.0.1", key=bytes(16)).host == "10.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_peers_are_told_an_address_that_they_can_connect_to(host: str) -> None:
    """All interfaces are nothing that a ticket could name."""
    with pytest.raises(ConfigError, match="pass advertised_host as well"):
        NixlConfig(block_size=4, host=host, key=bytes(16))
    config = NixlConfig(block_size=4, host=host, advertised_host="10.0.0.1", key=bytes(16))
    assert config.advertised_host == "10.0.0.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 2**20 + 1),
        ("lease_s", 0.0),
        ("lease_s", 86401.0),
        ("port", 70000),
        ("idle_poll_s", float("nan")),
        ("engine_id", "a\nb"),
        ("engine_id", 5),
        ("advertised_host", "h" * 257),
        ("allowed_peers", "10.0.0.1"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    """A setting that cannot work is named with its value."""
    with pytest.raises(ConfigError, match=name):
        NixlConfig(**{"block_size": 4} | {name: value})
