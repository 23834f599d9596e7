"""`push_to`: what a decode engine tells a prefill engine that is to send KV ahead."""

from __future__ import annotations

from typing import Any, Final

import attrs

from pdcore.connector.nixl import checked
from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.signing import PlainForm, as_shortest

__all__ = ["PUSH_TO", "PushParams"]

PUSH_TO: Final = "push_to"
"""The field of a prefill's ``kv_transfer_params`` that holds them."""

_VERSION = 1
_MAX_NUM_SLOTS = 1 << 20
_FORM = PlainForm(
    name=PUSH_TO,
    flag="expects_push",
    version=_VERSION,
    origin="the decode engine's expect_push()",
    misfit=(
        "push_to must be what the decode engine's expect_push() returned: a mapping with "
        "expects_push=True, or None for no push"
    ),
)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class PushParams:
    """Leave to write one prompt's first blocks into slots of one engine's staging memory.

    Args:
        engine_id, epoch: the engine that expects them, and which life of the engine.
        push_id: the push.
        host, port: where its side channel listens.
        slots: where the prompt's first blocks go, by position.
        block_size: tokens in a block.
        lease_s: how long the slots are kept without a sign of life from the writer.
        prompt_digest: of the prompt they are for.
        version: of this format.

    Raises:
        ValueError: a field is not what it should be; `from_dict` makes it `InvalidTransferParams`.
    """

    engine_id: str = attrs.field(validator=checked.text())
    epoch: str = attrs.field(validator=checked.text())
    push_id: str = attrs.field(validator=checked.text())
    host: str = attrs.field(validator=checked.text())
    port: int = attrs.field(validator=checked.integer(1, 65535))
    slots: tuple[int, ...] = attrs.field(
        converter=_as_tuple, validator=checked.int_list(2**31 - 1, max_length=_MAX_NUM_SLOTS)
    )
    block_size: int = attrs.field(validator=checked.integer(1, 1 << 20))
    lease_s: float = attrs.field(
        converter=as_shortest, validator=checked.seconds(checked.MAX_LEASE_S)
    )
    prompt_digest: str = attrs.field(validator=checked.hex_digits(64))
    version: int = attrs.field(default=_VERSION, validator=checked.integer(_VERSION, _VERSION))

    def __attrs_post_init__(self) -> None:
        if not self.slots or len(set(self.slots)) != len(self.slots):
            raise ValueError("slots is empty, or names a slot twice")

    @property
    def peer_id(self) -> str:
        """Names one life of one engine."""
        return f"{self.engine_id}:{self.epoch}"

    def to_dict(self, *, key: bytes | None = None) -> dict[str, Any]:
        """Return plain data that survives JSON, signed when there is a key."""
        return _FORM.write(attrs.asdict(self) | {"slots": list(self.slots)}, key)

    @classmethod
    def from_dict(
        cls,
        data: Any,
        *,
        key: bytes | None = None,
        allowed_peers: AllowedPeers | None = None,
        max_num_bytes: int = 1 << 20,
    ) -> PushParams:
        """Check a stranger's parameters and return them; see `PlainForm.read`.

        Raises:
            InvalidTransferParams: they are malformed, too large, of an unknown version, not signed
                as they should be, or name an address that is not allowed.
        """
        return _FORM.read(
            cls, data, key=key, allowed_peers=allowed_peers, max_num_bytes=max_num_bytes
        )
