"""`kv_transfer_params`: what a prefill engine tells a decode engine, by way of others.

They pass through routers and clients, so they are taken for what they are: words of a stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from pdcore.connector.nixl import checked
from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.ticket_contents import TicketContents
from pdcore.errors import InvalidTransferParams

__all__ = ["PARAMS_VERSION", "TransferParams"]

PARAMS_VERSION: Final = 1
_MAX_NUM_BLOCKS = 1 << 20
_MAX_NUM_TOKENS = 1 << 31
_MAX_LEASE_S = 86400.0
_FLAG = "do_remote_prefill"


def _as_tuple(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else value


def _as_shortest(value: Any) -> Any:
    # 30.0 and 30 are one number to JSON, but not to a signature over its text.
    return int(value) if isinstance(value, float) and value.is_integer() else value


@attrs.frozen(kw_only=True)
class TransferParams:
    """A ticket to read one prompt's KV from one engine.

    Args:
        engine_id, epoch: the engine that holds it, and which life of the engine.
        transfer_id: the hand-over.
        host, port: where its side channel listens.
        block_ids, generations: the blocks by position, and their generations.
        num_tokens: how many tokens of the prompt have their KV in them.
        block_size: tokens in a block.
        fingerprint: model, dtype and layout of the KV memory.
        tp_size: over how many ranks the KV is spread.
        lease_s: how long it is kept without a renewal.
        prompt_digest: of the prompt it belongs to.
        version: of this format.

    Raises:
        ValueError: a field is not what it should be; `from_dict` makes it `InvalidTransferParams`.
    """

    engine_id: str = attrs.field(validator=checked.text())
    epoch: str = attrs.field(validator=checked.text())
    transfer_id: str = attrs.field(validator=checked.text())
    host: str = attrs.field(validator=checked.text())
    port: int = attrs.field(validator=checked.integer(1, 65535))
    block_ids: tuple[int, ...] = attrs.field(
        converter=_as_tuple, validator=checked.int_list(2**31 - 1, max_length=_MAX_NUM_BLOCKS)
    )
    generations: tuple[int, ...] = attrs.field(
        converter=_as_tuple, validator=checked.int_list(2**63 - 1, max_length=_MAX_NUM_BLOCKS)
    )
    num_tokens: int = attrs.field(validator=checked.integer(1, _MAX_NUM_TOKENS))
    block_size: int = attrs.field(validator=checked.integer(1, 1 << 20))
    fingerprint: str = attrs.field(validator=checked.text(max_length=1024, allow_empty=True))
    tp_size: int = attrs.field(validator=checked.integer(1, 4096))
    lease_s: float = attrs.field(converter=_as_shortest, validator=checked.seconds(_MAX_LEASE_S))
    prompt_digest: str = attrs.field(validator=checked.hex_digits(64))
    version: int = attrs.field(
        default=PARAMS_VERSION, validator=checked.integer(PARAMS_VERSION, PARAMS_VERSION)
    )

    def __attrs_post_init__(self) -> None:
        needed = -(-self.num_tokens // self.block_size)
        if len(self.block_ids) != needed or len(self.generations) != needed:
            raise ValueError(
                f"{len(self.block_ids)} blocks with {len(self.generations)} generations do not "
                f"fit {self.num_tokens} tokens in blocks of {self.block_size}"
            )

    @property
    def peer_id(self) -> str:
        """Names one life of one engine."""
        return f"{self.engine_id}:{self.epoch}"

    @property
    def contents(self) -> TicketContents:
        """What the ticket stands for."""
        return TicketContents(
            block_ids=self.block_ids,
            generations=self.generations,
            num_tokens=self.num_tokens,
            block_size=self.block_size,
            prompt_digest=self.prompt_digest,
        )

    def to_dict(self, *, key: bytes | None = None) -> dict[str, Any]:
        """Return plain data that survives JSON, signed when there is a key."""
        data = attrs.asdict(self)
        data["block_ids"] = list(self.block_ids)
        data["generations"] = list(self.generations)
        data[_FLAG] = True
        if key is not None:
            data["signature"] = _signature(data, key)
        return data

    @staticmethod
    def look_like(data: Mapping[str, Any]) -> bool:
        """Whether a stranger's parameters may be such: other connectors' name their kind."""
        return data.get(_FLAG) is True and "kind" not in data

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        *,
        key: bytes | None = None,
        allowed_peers: AllowedPeers | None = None,
        max_num_bytes: int = 1 << 20,
    ) -> TransferParams:
        """Check a stranger's parameters and return them.

        Args:
            data: what `to_dict` made, or what somebody wants to pass for it.
            key: when given, the signature must be right.
            allowed_peers: which addresses are acceptable. The default list gives way to a
                signature; a list that was configured holds in any case.
            max_num_bytes: how large the parameters may be, as JSON.

        Raises:
            InvalidTransferParams: they are malformed, too large, of an unknown version, not signed
                as they should be, or name an address that is not allowed.
        """
        allowed = allowed_peers or AllowedPeers()
        fields = _plain_fields(data, max_num_bytes)
        if key is not None:
            _check_signature(fields, key)
        params = cls._build(fields)
        vouched_for = key is not None and allowed.is_default
        if not vouched_for and (params.host, params.port) not in allowed:
            raise InvalidTransferParams(
                f"kv_transfer_params name the address {params.host}:{params.port}, which is not "
                "allowed here: add it to allowed_peers, or share a key with that engine"
            )
        return params

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> TransferParams:
        version = fields.get("version")
        if type(version) is not int or version != PARAMS_VERSION:
            raise InvalidTransferParams(
                f"kv_transfer_params are of version {version!r}, this engine reads version "
                f"{PARAMS_VERSION}: run the same pdcore on both engines"
            )
        known = attrs.fields_dict(cls).keys()
        given = fields.keys() - {_FLAG, "signature"}
        if given != known:
            raise InvalidTransferParams(
                f"kv_transfer_params lack {_names(known - given)} and have unknown "
                f"{_names(given - known)}: pass on exactly what the prefill engine returned"
            )
        try:
            return cls(**{name: fields[name] for name in known})
        except ValueError as error:
            raise InvalidTransferParams(
                f"kv_transfer_params are malformed: {error}; "
                "pass on exactly what the prefill engine returned"
            ) from None


def _names(names: Iterable[str]) -> str:
    listed = sorted(repr(name)[:40] for name in names)
    return ", ".join(listed[:5]) or "nothing"


def _plain_fields(data: Mapping[str, Any], max_num_bytes: int) -> dict[str, Any]:
    """A copy that nobody else can change, once its size is known to be bounded."""
    if not isinstance(data, Mapping) or data.get(_FLAG) is not True:
        raise InvalidTransferParams(
            f"kv_transfer_params must be a mapping with {_FLAG}=True (to read KV from a prefill "
            "engine) or do_remote_decode=True (to prefill for a decode engine)"
        )
    num_items = sum(len(value) for value in data.values() if hasattr(value, "__len__"))
    if len(data) > 64 or num_items > max_num_bytes:
        raise InvalidTransferParams(
            f"kv_transfer_params have {len(data)} fields with {num_items} items, which is more "
            f"than fits into max_params_bytes={max_num_bytes}"
        )
    text = _canonical(data)
    if len(text) > max_num_bytes:
        raise InvalidTransferParams(
            f"kv_transfer_params take {len(text)} bytes, the limit is "
            f"max_params_bytes={max_num_bytes}"
        )
    fields: dict[str, Any] = json.loads(text)
    return fields


def _canonical(data: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(
            dict(data), sort_keys=True, separators=(",", ":"), allow_nan=False
        ).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTransferParams(
            f"kv_transfer_params are not plain JSON data: {str(error)[:100]}"
        ) from None


def _signature(data: Mapping[str, Any], key: bytes) -> str:
    unsigned = {name: _as_shortest(value) for name, value in data.items() if name != "signature"}
    message = b"pdcore kv_transfer_params\0" + _canonical(unsigned)
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def _check_signature(fields: Mapping[str, Any], key: bytes) -> None:
    given = fields.get("signature")
    if not isinstance(given, str) or not given.isascii():
        given = ""
    if not hmac.compare_digest(given, _signature(fields, key)):
        raise InvalidTransferParams(
            "kv_transfer_params are not signed with this engine's key: they were changed on the "
            "way, or the two engines have different keys"
        )
