"""What a loopback prefill engine tells the decode engine, as ``kv_transfer_params``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from pdcore.connector.ticket_contents import TicketContents
from pdcore.errors import InvalidTransferParams
from pdcore.shown import shown

__all__ = ["LoopbackTicket"]

_VERSION = 2
_KIND = "loopback"


@attrs.frozen(kw_only=True)
class LoopbackTicket:
    """Where the KV of a prompt lies, and until when.

    Args:
        engine_id, engine_epoch: which life of which engine has it.
        transfer_id: the ticket's name there.
        block_ids, generations: its blocks, in order of position.
        num_tokens: how many tokens have their KV in them.
        block_size: tokens in a block.
        prompt_digest: of the prompt it belongs to.
        lease_s: how long a renewal keeps the blocks.
    """

    engine_id: str
    engine_epoch: int
    transfer_id: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int
    block_size: int
    prompt_digest: str
    lease_s: float

    @property
    def contents(self) -> TicketContents:
        """What the ticket stands for."""
        return TicketContents.of(self)

    def to_params(self) -> dict[str, Any]:
        """Plain data that survives JSON."""
        return {
            "do_remote_prefill": True,
            "kind": _KIND,
            "version": _VERSION,
            "engine_id": self.engine_id,
            "engine_epoch": self.engine_epoch,
            "transfer_id": self.transfer_id,
            "block_ids": list(self.block_ids),
            "generations": list(self.generations),
            "num_tokens": self.num_tokens,
            "block_size": self.block_size,
            "prompt_digest": self.prompt_digest,
            "lease_s": self.lease_s,
        }

    @staticmethod
    def is_in(params: Mapping[str, Any]) -> bool:
        """Whether parameters say of themselves that `to_params` wrote them."""
        return params.get("kind") == _KIND

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> LoopbackTicket | None:
        """Read what `to_params` wrote; None when the parameters ask for no load.

        Raises:
            InvalidTransferParams: a field is missing, malformed, or of another version or kind.
        """
        if params is None or params.get("do_remote_prefill") is not True:
            return None
        for name, expected in (("kind", _KIND), ("version", _VERSION)):
            if params.get(name) != expected:
                raise InvalidTransferParams(
                    f"kv_transfer_params[{name!r}]={shown(params.get(name))}: expected "
                    f"{expected!r}. Prefill and decode must use the same connector and version."
                )
        ticket = cls(
            engine_id=_field(params, "engine_id", _is_name),
            engine_epoch=_field(params, "engine_epoch", _is_count),
            transfer_id=_field(params, "transfer_id", _is_name),
            block_ids=tuple(_field(params, "block_ids", _is_counts)),
            generations=tuple(_field(params, "generations", _is_counts)),
            num_tokens=_field(params, "num_tokens", _is_count),
            block_size=_field(params, "block_size", _is_count),
            prompt_digest=_field(params, "prompt_digest", _is_name),
            lease_s=_field(params, "lease_s", _is_seconds),
        )
        ticket._check_sizes()
        return ticket

    def _check_sizes(self) -> None:
        room = len(self.block_ids) * self.block_size
        if not 0 < self.num_tokens <= room or len(self.block_ids) != len(self.generations):
            raise InvalidTransferParams(
                f"kv_transfer_params name {len(self.block_ids)} blocks of {self.block_size} tokens "
                f"and {len(self.generations)} generations for {self.num_tokens} tokens"
            )


def _field(params: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool]) -> Any:
    value = params.get(name)
    if not is_valid(value):
        raise InvalidTransferParams(
            f"kv_transfer_params[{name!r}]={shown(value)} is missing or malformed. "
            "Pass on what the prefill engine returned, unchanged."
        )
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max
