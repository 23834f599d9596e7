"""What a prefill engine tells a decode engine, by way of strangers."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.connector.tickets import asks_for_hand_over
from pdcore.errors import ConfigError, InvalidTransferParams
from pdcore.request import Request

KEY = b"k" * 16
DIGEST = "ab" * 32


def some_params(**changes: Any) -> TransferParams:
    """A valid ticket, but for the changes."""
    fields: dict[str, Any] = {
        "engine_id": "p",
        "epoch": "1",
        "transfer_id": "t",
        "host": "127.0.0.1",
        "port": 5600,
        "block_ids": (3, 4),
        "generations": (1, 1),
        "num_tokens": 20,
        "block_size": 16,
        "fingerprint": "model",
        "tp_size": 1,
        "lease_s": 30.0,
        "prompt_digest": DIGEST,
    }
    return TransferParams(**fields | changes)


@st.composite
def any_params(draw: st.DrawFn) -> TransferParams:
    """Any valid ticket."""
    block_size = draw(st.integers(1, 64))
    num_tokens = draw(st.integers(1, 300))
    num_blocks = -(-num_tokens // block_size)
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=num_blocks, max_size=num_blocks)
    name = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=40)
    return some_params(
        engine_id=draw(name),
        epoch=draw(name),
        transfer_id=draw(name),
        port=draw(st.integers(1, 65535)),
        block_ids=draw(ids),
        generations=draw(ids),
        num_tokens=num_tokens,
        block_size=block_size,
        lease_s=draw(st.floats(0.001, 3600)),
    )


@given(any_params(), st.sampled_from([None, KEY]))
def test_round_trip(params: TransferParams, key: bytes | None) -> None:
    """Parameters survive JSON, with and without a signature."""
    data = json.loads(json.dumps(params.to_dict(key=key)))
    assert TransferParams.from_dict(data, key=key) == params


@given(any_params(), st.data())
def test_any_changed_byte_is_refused(params: TransferParams, data: st.DataObject) -> None:
    """Whatever byte of signed parameters is changed, they are refused."""
    text = bytearray(json.dumps(params.to_dict(key=KEY)).encode())
    index = data.draw(st.integers(0, len(text) - 1))
    text[index] ^= data.draw(st.integers(1, 255))
    try:
        changed = json.loads(text)
    except ValueError:
        return
    if changed == params.to_dict(key=KEY):
        return  # such as 1.5E0 for 1.5e0: another text for the same data
    with pytest.raises(InvalidTransferParams):
        TransferParams.from_dict(changed, key=KEY)


def test_numbers_may_lose_their_point() -> None:
    """A router that writes 30.0 as 30, or 30 as 30.0, does not break the signature."""
    data = some_params(lease_s=30.0).to_dict(key=KEY)
    assert TransferParams.from_dict(data | {"lease_s": 30}, key=KEY).lease_s == 30
    assert TransferParams.from_dict(data | {"lease_s": 30.0}, key=KEY).lease_s == 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"version": "1"}, "version '1'"),
        ({"port": 0}, "port"),
        ({"port": True}, "port"),
        ({"port": "5600"}, "port"),
        ({"host": ""}, "host"),
        ({"host": "a\nb"}, "host"),
        ({"engine_id": "x" * 300}, "engine_id"),
        ({"block_ids": [3]}, "do not fit"),
        ({"block_ids": [3, -4]}, "block_ids"),
        ({"block_ids": [3, 4.0]}, "block_ids"),
        ({"block_ids": "34"}, "block_ids"),
        ({"generations": [1]}, "do not fit"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 100}, "do not fit"),
        ({"block_size": 0}, "block_size"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": 1e9}, "lease_s"),
        ({"prompt_digest": "zz"}, "prompt_digest"),
        ({"extra": 1}, "unknown 'extra'"),
        ({"lease_s": float("nan")}, "not plain JSON"),
        ({"host": object()}, "not plain JSON"),
        ({"host": list}, "not plain JSON"),
        ({"version": "1" * 1000}, "version '1111"),
        ({"block_ids": list(range(2_000_000))}, "max_params_bytes"),
        ({"engine_id": {"a": "x" * (1 << 20)}}, "max_params_bytes"),
        ({"do_remote_prefill": 1}, "do_remote_prefill=True"),
    ],
)
def test_malformed_parameters_are_refused_in_one_sentence(
    changes: dict[str, Any], words: str
) -> None:
    """Whatever is wrong with parameters is named, without a long echo."""
    with pytest.raises(InvalidTransferParams, match=words) as caught:
        TransferParams.from_dict(some_params().to_dict() | changes)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["engine_id", "port", "prompt_digest", "transfer_id"])
def test_missing_fields_are_named(name: str) -> None:
    """A field that is not there is named."""
    data = some_params().to_dict()
    del data[name]
    with pytest.raises(InvalidTransferParams, match=f"lack '{name}'"):
        TransferParams.from_dict(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    st.sampled_from(sorted(some_params().to_dict())),
)
def test_no_value_crashes_the_check(value: Any, name: str) -> None:
    """Any value in any field is either fine or refused by name; nothing else is raised."""
    with contextlib.suppress(InvalidTransferParams):
        TransferParams.from_dict(some_params().to_dict() | {name: value})


def test_deep_data_is_refused() -> None:
    """Data nested beyond all measure is refused, not a crash."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidTransferParams):
        TransferParams.from_dict(some_params().to_dict() | {"host": deep})


def test_an_unsigned_ticket_is_refused_by_who_has_a_key() -> None:
    """With a key, parameters without a signature, or with another key's, are refused."""
    with pytest.raises(InvalidTransferParams, match="not signed"):
        TransferParams.from_dict(some_params().to_dict(), key=KEY)
    with pytest.raises(InvalidTransferParams, match="not signed"):
        TransferParams.from_dict(some_params().to_dict(key=b"x" * 16), key=KEY)


def test_foreign_addresses_need_a_list_or_a_signature() -> None:
    """An address off loopback is refused, unless it is listed or the default list and signed."""
    params = some_params(host="10.1.2.3")
    with pytest.raises(InvalidTransferParams, match=r"10\.1\.2\.3:5600"):
        TransferParams.from_dict(params.to_dict())
    listed = AllowedPeers(["10.0.0.0/8"])
    assert TransferParams.from_dict(params.to_dict(), allowed_peers=listed) == params
    assert TransferParams.from_dict(params.to_dict(key=KEY), key=KEY) == params


def test_a_list_binds_signed_parameters_too() -> None:
    """A list that was configured is kept to even when the signature is right."""
    data = some_params(host="10.1.2.3").to_dict(key=KEY)
    with pytest.raises(InvalidTransferParams, match="not allowed"):
        TransferParams.from_dict(data, key=KEY, allowed_peers=AllowedPeers(["192.168.0.0/16"]))


@pytest.mark.parametrize(
    ("pattern", "host", "port", "expected"),
    [
        ("10.0.0.0/8", "10.9.9.9", 1, True),
        ("10.0.0.0/8", "11.0.0.1", 1, False),
        ("10.0.0.0/8", "10.evil.example", 1, False),
        ("*", "10.1.1.1", 1, False),
        ("p1:5600", "p1", 5600, True),
        ("p1:5600", "p1", 5601, False),
        ("*.cluster.local", "a.cluster.local", 9, True),
        ("*.cluster.local", "a.cluster.local.evil", 9, False),
        ("[::1]:5600", "::1", 5600, True),
        ("[::1]:5600", "::1", 5601, False),
        ("::1", "::1", 7, True),
        ("127.0.0.1", "127.0.0.1", 7, True),
        ("127.0.0.1", "127.0.0.2", 7, False),
    ],
)
def test_address_patterns(pattern: str, host: str, port: int, expected: bool) -> None:
    """Hosts, ports, networks and name patterns mean what they say, and no more."""
    assert ((host, port) in AllowedPeers([pattern])) is expected


UNREADABLE = ["", "host:", "host:0", "host:99999", "host:http"]
UNREADABLE += ["10.*", "10.0.0.300", "10.0.0.5/8", "10.0.0.0/33", "10.0.0.0/8:http", "fe80::zz"]


@pytest.mark.parametrize("pattern", UNREADABLE)
def test_unreadable_patterns_are_named(pattern: str) -> None:
    """A pattern that cannot be read, or can match nothing, is an error that quotes it."""
    with pytest.raises(ConfigError, match=f"allowed_peers holds '{re.escape(pattern)}'"):
        AllowedPeers([pattern])


def test_loopback_is_the_default() -> None:
    """Without a list only loopback addresses are allowed."""
    assert ("127.3.2.1", 1) in AllowedPeers()
    assert ("localhost", 1) in AllowedPeers()
    assert ("127.0.0.1.evil.example", 1) not in AllowedPeers()


def test_the_digest_tells_prompts_apart() -> None:
    """Another token, order or adapter is another digest; another request id is not."""
    digest = prompt_digest(Request("a", [1, 2]))
    assert digest == prompt_digest(Request("b", [1, 2]))
    others = [Request("a", [2, 1]), Request("a", [1]), Request("a", [1, 2], lora="x")]
    assert digest not in set(map(prompt_digest, others))


def test_who_asks_for_a_hand_over() -> None:
    """Only the flag itself, and only when true, asks for a hand-over."""
    assert asks_for_hand_over({"do_remote_decode": True})
    assert not asks_for_hand_over({"do_remote_decode": 1})
    assert not asks_for_hand_over({})
    assert not asks_for_hand_over(None)
