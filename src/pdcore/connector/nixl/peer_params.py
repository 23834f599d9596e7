"""What an engine tells peers by way of others: who it is, where it listens, for which prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import numpy as np

from pdcore.connector.nixl import checked
from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.signing import PlainForm, as_shortest

__all__ = ["PeerParams", "as_tuple"]


def as_tuple(value: Any) -> Any:
    """A list or an array as a tuple, to be validated."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class PeerParams:
    """Base of parameters that pass through routers and clients.

    Args:
        engine_id, epoch: the engine that gave them, and which life of the engine.
        host, port: where its side channel listens.
        block_size: tokens in one of its blocks.
        lease_s: how long it keeps what they stand for without a sign of life.
        prompt_digest: of the prompt they belong to.

    Raises:
        ValueError: a field is not what it should be; `from_dict` makes it `InvalidTransferParams`.
    """

    form: ClassVar[PlainForm]
    """How this kind is written and read."""

    engine_id: str = attrs.field(validator=checked.text())
    epoch: str = attrs.field(validator=checked.text())
    host: str = attrs.field(validator=checked.text())
    port: int = attrs.field(validator=checked.integer(1, 65535))
    block_size: int = attrs.field(validator=checked.integer(1, 1 << 20))
    lease_s: float = attrs.field(
        converter=as_shortest, validator=checked.seconds(checked.MAX_LEASE_S)
    )
    prompt_digest: str = attrs.field(validator=checked.hex_digits(64))

    @property
    def engine(self) -> EngineName:
        return EngineName(engine_id=self.engine_id, epoch=self.epoch)

    @property
    def peer_id(self) -> str:
        """Names one life of one engine."""
        return self.engine.peer_id

    def to_dict(self, *, key: bytes | None = None) -> dict[str, Any]:
        """Return plain data that survives JSON, signed when there is a key."""
        fields = attrs.asdict(self)
        lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
        return self.form.write(fields | lists, key)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        *,
        key: bytes | None = None,
        allowed_peers: AllowedPeers | None = None,
        max_num_bytes: int = 1 << 20,
    ) -> Self:
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
        return cls.form.read(
            cls, data, key=key, allowed_peers=allowed_peers, max_num_bytes=max_num_bytes
        )
