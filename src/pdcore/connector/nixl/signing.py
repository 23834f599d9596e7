"""Parameters that pass through strangers: bounded, plain, signed, and of a known form."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sized
from typing import Any, TypeVar

import attrs

from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.errors import InvalidTransferParams
from pdcore.shown import shown

__all__ = ["PlainForm", "as_shortest"]

_MAX_NUM_FIELDS = 64
_SIGNATURE = "signature"

ParamsT = TypeVar("ParamsT")


def as_shortest(value: Any) -> Any:
    """30.0 and 30 are one number to JSON, but not to a signature over its text."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@attrs.frozen(kw_only=True)
class PlainForm:
    """How one kind of parameters is written and read.

    Args:
        name: what it is called in messages to people, and in signatures.
        flag: a field that is true in all of them and in no other kind.
        version: the one that is read.
        origin: who makes them, for people.
        misfit: what to say of data without the flag.
        mix_up: what to say of parameters that belong to another prompt.
    """

    name: str
    flag: str
    version: int
    origin: str
    misfit: str
    mix_up: str

    def write(self, fields: dict[str, Any], key: bytes | None) -> dict[str, Any]:
        """Plain data that survives JSON, signed when there is a key."""
        data = fields | {self.flag: True}
        if key is not None:
            data[_SIGNATURE] = self._signature(data, key)
        return data

    def read(
        self,
        cls: type[ParamsT],
        data: Any,
        *,
        key: bytes | None,
        allowed_peers: AllowedPeers | None,
        max_num_bytes: int,
    ) -> ParamsT:
        """Check a stranger's parameters and make a ``cls`` of them.

        Args:
            cls: an attrs class with ``host`` and ``port``, whose validators raise `ValueError`.
            data: what `write` made, or what somebody wants to pass for it.
            key: when given, the signature must be right.
            allowed_peers: which addresses are acceptable. The default list gives way to a
                signature; a list that was configured holds in any case.
            max_num_bytes: how large the parameters may be, as JSON.

        Raises:
            InvalidTransferParams: they are malformed, too large, of an unknown version, not signed
                as they should be, or name an address that is not allowed.
        """
        allowed = allowed_peers or AllowedPeers()
        fields = self._plain_fields(data, max_num_bytes)
        if key is not None:
            self._check_signature(fields, key)
        params = self._build(cls, fields)
        address: tuple[str, int] = (params.host, params.port)  # type: ignore[attr-defined]
        vouched_for = key is not None and allowed.is_default
        if not vouched_for and address not in allowed:
            raise InvalidTransferParams(
                f"{self.name} name the address {address[0]}:{address[1]}, which is not allowed "
                "here: add it to allowed_peers, or share a key with that engine"
            )
        return params

    def _build(self, cls: type[ParamsT], fields: dict[str, Any]) -> ParamsT:
        version = fields.get("version")
        if type(version) is not int or version != self.version:
            raise InvalidTransferParams(
                f"{self.name} are of version {shown(version)}, this engine reads version "
                f"{self.version}: run the same pdcore on both engines"
            )
        known = attrs.fields_dict(cls).keys()  # type: ignore[arg-type]
        given = fields.keys() - {self.flag, _SIGNATURE}
        if given != known:
            raise InvalidTransferParams(
                f"{self.name} lack {_names(known - given)} and have unknown "
                f"{_names(given - known)}: pass on exactly what {self.origin} returned"
            )
        try:
            return cls(**{name: fields[name] for name in known})
        except ValueError as error:
            raise InvalidTransferParams(
                f"{self.name} are malformed: {error}; pass on exactly what {self.origin} returned"
            ) from None

    def _plain_fields(self, data: Any, max_num_bytes: int) -> dict[str, Any]:
        """A copy that nobody else can change, once its size is known to be bounded."""
        if not isinstance(data, Mapping) or data.get(self.flag) is not True:
            raise InvalidTransferParams(self.misfit)
        num_items = sum(len(value) for value in data.values() if isinstance(value, Sized))
        if len(data) > _MAX_NUM_FIELDS or num_items > max_num_bytes:
            raise InvalidTransferParams(
                f"{self.name} have {len(data)} fields with {num_items} items, which is more "
                f"than fits into max_params_bytes={max_num_bytes}"
            )
        text = self._canonical(data)
        if len(text) > max_num_bytes:
            raise InvalidTransferParams(
                f"{self.name} take {len(text)} bytes, the limit is max_params_bytes={max_num_bytes}"
            )
        fields: dict[str, Any] = json.loads(text)
        return fields

    def _canonical(self, data: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(
                dict(data), sort_keys=True, separators=(",", ":"), allow_nan=False
            ).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidTransferParams(
                f"{self.name} are not plain JSON data: {str(error)[:100]}"
            ) from None

    def _signature(self, data: Mapping[str, Any], key: bytes) -> str:
        unsigned = {name: as_shortest(value) for name, value in data.items() if name != _SIGNATURE}
        message = f"pdcore {self.name}\0".encode() + self._canonical(unsigned)
        return hmac.new(key, message, hashlib.sha256).hexdigest()

    def _check_signature(self, fields: Mapping[str, Any], key: bytes) -> None:
        given = fields.get(_SIGNATURE)
        if not isinstance(given, str) or not given.isascii():
            given = ""
        if not hmac.compare_digest(given, self._signature(fields, key)):
            raise InvalidTransferParams(
                f"{self.name} are not signed with this engine's key: they were changed on the "
                "way, or the two engines have different keys"
            )


def _names(names: Iterable[str]) -> str:
    listed = sorted(repr(name)[:40] for name in names)
    return ", ".join(listed[:5]) or "nothing"
