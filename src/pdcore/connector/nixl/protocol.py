"""The side channel's messages: plain JSON objects, each with a type, each checked when it comes in.

On one connection::

    prefill engine                       decode engine
    Challenge(engine, epoch, nonce)  ──►
                                     ◄── Hello(engine, nonce, proof)
    Welcome(proof) or Refusal        ──►
                                     ◄── Describe | Renew | Reading | Accept | Release
    Description | Answer | Refusal   ──►     ... one reply for each request, in order

If the prefill engine pushes, it asks the decode engine as well, over a connection of its own::

    decode engine                        prefill engine
                                     ◄── Claim | Pushing | PushEnded
    Description | Answer | Refusal   ──►
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import attrs

from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl import checked
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import RankEndpoint
from pdcore.connector.tickets import TicketAnswer
from pdcore.errors import TransferError

__all__ = [
    "PROTOCOL_VERSION",
    "Accept",
    "Answer",
    "Challenge",
    "Claim",
    "Describe",
    "Description",
    "Hello",
    "Message",
    "ProtocolError",
    "PushEnded",
    "Pushing",
    "Reading",
    "Refusal",
    "Release",
    "Renew",
    "Welcome",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 2
_NONCE_DIGITS = 64
_MAX_TEXT = 512
_MAX_NUM_RANKS = 4096


class ProtocolError(TransferError):
    """Raised when a peer says something that is not part of the protocol."""


@attrs.frozen
class Message:
    """Base of all messages."""


def _version() -> Any:
    return attrs.field(default=PROTOCOL_VERSION, validator=checked.integer(0, 1 << 30))


def _name() -> Any:
    return attrs.field(validator=checked.text())


def _as_one_line(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return "".join(char if char.isprintable() else " " for char in value[:_MAX_TEXT])


def _words() -> Any:
    return attrs.field(
        default="",
        converter=_as_one_line,
        validator=checked.text(max_length=_MAX_TEXT, allow_empty=True),
    )


def _nonce() -> Any:
    return attrs.field(validator=checked.hex_digits(_NONCE_DIGITS))


def _ids(high: int, *, max_length: int) -> Any:
    return attrs.field(
        converter=lambda value: tuple(value) if isinstance(value, list) else value,
        validator=checked.int_list(high, max_length=max_length),
    )


def _proof() -> Any:
    return attrs.field(default="", validator=checked.text(max_length=64, allow_empty=True))


@attrs.frozen(kw_only=True)
class Challenge(Message):
    """The server names itself and asks for a proof that the client knows the key."""

    engine_id: str = _name()
    epoch: str = _name()
    nonce: str = _nonce()
    version: int = _version()


@attrs.frozen(kw_only=True)
class Hello(Message):
    """The client names itself, proves that it knows the key, and asks for the same."""

    engine_id: str = _name()
    epoch: str = _name()
    nonce: str = _nonce()
    proof: str = _proof()
    version: int = _version()


@attrs.frozen(kw_only=True)
class Welcome(Message):
    """The server proves that it knows the key."""

    proof: str = _proof()


@attrs.frozen(kw_only=True)
class Refusal(Message):
    """The server will not do it, and says why."""

    reason: str = _words()


@attrs.frozen(kw_only=True)
class Describe(Message):
    """Asks for the engine's KV memory, rank by rank."""


@attrs.frozen(kw_only=True)
class Renew(Message):
    """Asks for a lease to start afresh."""

    transfer_id: str = _name()


@attrs.frozen(kw_only=True)
class Reading(Message):
    """Says that a read needs the workers' answers: they look often, and the lease starts afresh."""

    transfer_id: str = _name()


@attrs.frozen(kw_only=True)
class Accept(Message):
    """Asks whether what a read brought is what the ticket stands for.

    ``read`` names the read, so that nobody else's yes is taken for its own.
    """

    transfer_id: str = _name()
    contents_digest: str = attrs.field(validator=checked.hex_digits(64))
    read: str = _name()


@attrs.frozen(kw_only=True)
class Release(Message):
    """Gives a ticket back unread."""

    transfer_id: str = _name()
    reason: str = _words()


@attrs.frozen(kw_only=True)
class Claim(Message):
    """Asks to be the one that writes to a push's slots; the reply describes the memory.

    Args:
        push_id, slots, prompt_digest: the push, as its parameters name it.
        life_host, life_ports: where each of the writing ranks can be seen to live.
    """

    push_id: str = _name()
    slots: tuple[int, ...] = _ids(2**31 - 1, max_length=1 << 20)
    prompt_digest: str = attrs.field(validator=checked.hex_digits(64))
    life_host: str = _name()
    life_ports: tuple[int, ...] = _ids(65535, max_length=_MAX_NUM_RANKS)


@attrs.frozen(kw_only=True)
class Pushing(Message):
    """A sign of life from a writer. A no says that nobody wants its data any more."""

    push_id: str = _name()


@attrs.frozen(kw_only=True)
class PushEnded(Message):
    """The sender writes to a push's slots no more.

    Args:
        push_id: the push.
        ticket_id: the hand-over whose blocks were written; empty if there is none.
        num_blocks: how many of its blocks, from the first on, are wholly in their slots, and were
            held from before they were written until the ticket was granted.
        was_cut: whether a write was ended by force, so that parts of it may be on their way.
    """

    push_id: str = _name()
    ticket_id: str = attrs.field(default="", validator=checked.text(allow_empty=True))
    num_blocks: int = attrs.field(default=0, validator=checked.integer(0, 1 << 20))
    was_cut: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))


@attrs.frozen(kw_only=True)
class Answer(Message):
    """Yes or no, and why not."""

    ok: bool = attrs.field(validator=attrs.validators.instance_of(bool))
    reason: str = _words()
    remaining_s: float = attrs.field(default=0.0, validator=checked.seconds(1e9, allow_zero=True))

    @classmethod
    def of(cls, answer: TicketAnswer) -> Answer:
        """Put a registry's answer into words for a peer."""
        return cls(ok=answer.ok, reason=answer.reason, remaining_s=answer.remaining_s)


def _as_endpoints(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(_endpoint_from_json(item) for item in value[: _MAX_NUM_RANKS + 1])


def _are_endpoints(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    is_tuple = isinstance(value, tuple) and 0 < len(value) <= _MAX_NUM_RANKS
    if not is_tuple or not all(isinstance(item, RankEndpoint) for item in value):
        raise ValueError(f"{field.name} is not a list of 1..{_MAX_NUM_RANKS} ranks")


@attrs.frozen(kw_only=True)
class Description(Message):
    """The engine's KV memory, rank by rank."""

    block_size: int = attrs.field(validator=checked.integer(1, 1 << 20))
    ranks: tuple[RankEndpoint, ...] = attrs.field(converter=_as_endpoints, validator=_are_endpoints)


_TYPES: dict[str, type[Message]] = {
    cls.__name__.lower(): cls
    for cls in (
        Accept,
        Answer,
        Challenge,
        Claim,
        Describe,
        Description,
        Hello,
        PushEnded,
        Pushing,
        Reading,
        Refusal,
        Release,
        Renew,
        Welcome,
    )
}


_FIELDS = {cls: frozenset(attrs.fields_dict(cls)) for cls in _TYPES.values()}


def encode(message: Message) -> bytes:
    """The message as JSON text."""
    data: dict[str, Any] = {
        field.name: getattr(message, field.name) for field in attrs.fields(type(message))
    }
    data["type"] = type(message).__name__.lower()
    return _ENCODER.encode(data).encode()


def decode(text: bytes) -> Message:
    """Read and check a message.

    Raises:
        ProtocolError: it is not JSON, of an unknown type, or a field is not what it should be.
    """
    try:
        data = json.loads(text)
        cls = _TYPES[data.pop("type")]
        if data.keys() - _FIELDS[cls]:
            raise ValueError("it has unknown fields")
        return cls(**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a malformed message: {str(error)[:200]}") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, RankEndpoint):
        return {
            "agent_metadata": base64.b64encode(value.agent_metadata).decode(),
            "fingerprint": value.fingerprint,
            "layout": None if value.layout is None else attrs.asdict(value.layout),
            **attrs.asdict(value.region),
        }
    raise TypeError(f"{type(value).__name__} has no JSON form")


_ENCODER = json.JSONEncoder(default=_as_json, separators=(",", ":"))

_REGION_BOUNDS = {
    "address": 2**64 - 1,
    "num_blocks": 2**31 - 1,
    "bytes_per_block": 2**40,
    "device_id": 4096,
}


def _endpoint_from_json(data: Any) -> RankEndpoint:
    if not isinstance(data, dict):
        raise ValueError("a rank is not an object")
    for name, high in _REGION_BOUNDS.items():
        value = data.get(name)
        if type(value) is not int or not 0 <= value <= high:
            raise ValueError(f"a rank's {name} is not an integer in 0..{high}")
    if data.get("mem_type") not in ("DRAM", "VRAM"):
        raise ValueError("a rank's mem_type is neither DRAM nor VRAM")
    fingerprint, metadata = data.get("fingerprint"), data.get("agent_metadata")
    if not isinstance(fingerprint, str) or not isinstance(metadata, str):
        raise ValueError("a rank lacks its fingerprint or agent metadata")
    try:
        agent_metadata = base64.b64decode(metadata, validate=True)
    except binascii.Error:
        raise ValueError("a rank's agent metadata is not base64") from None
    region = MemoryRegion(mem_type=data["mem_type"], **{k: data[k] for k in _REGION_BOUNDS})
    return RankEndpoint(
        agent_metadata=agent_metadata,
        region=region,
        fingerprint=fingerprint,
        layout=_layout_from_json(data.get("layout")),
    )


_LAYOUT_BOUNDS = {
    "element_size": 64,
    "num_layers": 1 << 16,
    "num_components": 16,
    "block_size": 1 << 20,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 20,
    "tp_rank": _MAX_NUM_RANKS,
    "tp_size": _MAX_NUM_RANKS,
}


def _layout_from_json(data: Any) -> KVLayout | None:
    if data is None:
        return None
    if not isinstance(data, dict) or data.keys() != attrs.fields_dict(KVLayout).keys():
        raise ValueError("a rank's layout does not have the fields of a layout")
    for name, high in _LAYOUT_BOUNDS.items():
        if type(data[name]) is not int or not 0 <= data[name] <= high:
            raise ValueError(f"a rank's layout has a {name} that is not an integer in 0..{high}")
    for name in ("model", "dtype"):
        value = data[name]
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_TEXT:
            raise ValueError(f"a rank's layout has a {name} that is not a short plain string")
    return KVLayout(**data)
