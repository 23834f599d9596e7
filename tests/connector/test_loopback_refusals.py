"""What `LoopbackConnector` refuses: parameters and settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from loopback_engines import (
    BLOCK_SIZE,
    PROMPT,
    make_pair,
    solo,
)

from odd_values import DEEP
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import ConfigError, InvalidTransferParams
from pdcore.request import Request
from pdcore.testing import VirtualClock

# Bad parameters.


def params_with(**changes: Any) -> dict[str, Any]:
    """Good parameters of engine p, with some changed."""
    ticket = LoopbackTicket(
        engine_id="p",
        engine_epoch=0,
        transfer_id="t",
        block_ids=(1, 2),
        generations=(1, 1),
        num_tokens=8,
        block_size=BLOCK_SIZE,
        prompt_digest=prompt_digest(Request("r", PROMPT)),
        lease_s=9.0,
    )
    return ticket.to_params() | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "version"),
        ({"kind": "nixl"}, "kind"),
        ({"engine_id": "nobody"}, "'nobody' never joined"),
        ({"engine_id": 5}, "engine_id"),
        ({"engine_epoch": True}, "engine_epoch"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"block_ids": "12"}, "block_ids"),
        ({"block_ids": [1, -2]}, "block_ids"),
        ({"generations": [1]}, "1 generations"),
        ({"num_tokens": 9}, "for 9 tokens"),
        ({"num_tokens": 0}, "for 0 tokens"),
        ({"block_size": 2, "num_tokens": 4}, "blocks of 2 tokens"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": None}, "lease_s"),
        ({"lease_s": 10**400}, "lease_s"),
        *(({name: DEEP}, name) for name in ("version", "kind", "engine_id", "block_ids")),
        ({"prompt_digest": None}, "prompt_digest"),
        ({"prompt_digest": "0" * 64}, "another prompt"),
    ],
)
def test_bad_parameters_are_refused_when_the_request_is_added(
    changes: dict[str, Any], message: str
):
    """The error names the field; nothing of the request stays."""
    _, decode, _ = make_pair()
    request = Request("r", PROMPT, kv_transfer_params=params_with(**changes))
    with pytest.raises(InvalidTransferParams, match=message):
        decode.scheduler.add_request(request)
    assert not decode.scheduler.has_requests()


def test_foreign_blocks_are_refused():
    """A ticket that names blocks the peer does not have fails its load alone."""
    prefill, decode, _ = make_pair(on_load_failure="fail")
    params = prefill.prefill() | {"block_ids": [1, 2, 3, 4, 400]}
    decode.add(params)
    end = decode.driver.run()["r"].end
    assert end is not None
    assert "block 400" in (end.cause or "")


@pytest.mark.parametrize("field", ["block_ids", "generations", "num_tokens"])
def test_what_was_changed_on_the_way_is_not_vouched_for(field: str):
    """Whatever the ticket says otherwise, the peer finds out before it says yes."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    other = prefill.prefill([token + 1 for token in PROMPT], name="other")
    forged = {
        "block_ids": other["block_ids"],
        "generations": [g + 1 for g in params["generations"]],
        "num_tokens": params["num_tokens"] - 1,
    }
    assert forged[field] != params[field]
    assert decode.decode(params | {field: forged[field]}) == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=0), "block_size=0"),
        (
            lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=4, lease_s=0),
            "lease_s=0",
        ),
        (
            lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=4).worker_side(1),
            "rank=1",
        ),
        (lambda _: LoopbackFaults(delay_polls=-1), "delay_polls=-1"),
        (lambda _: LoopbackFaults(delay_s=float("nan")), "delay_s=nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[Any], Any], message: str):
    """The error names the setting."""
    with pytest.raises(ConfigError, match=message):
        make(LoopbackFabric())


def test_a_peer_is_woken_when_its_hand_over_ends():
    """The prefill engine's loop need not poll for the end of its holds."""
    prefill, decode, _ = make_pair()
    woken = threading.Event()
    prefill.connector.start(clock=VirtualClock(), notify=woken.set)
    params = prefill.prefill()
    assert not woken.is_set()
    decode.decode(params)
    assert woken.is_set()
