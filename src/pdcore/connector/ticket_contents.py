"""What a hand-over promises its reader, and a digest that tells one promise from any other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import attrs

from pdcore.errors import TransferError
from pdcore.request import Request

__all__ = ["TicketContents", "prompt_digest"]


def prompt_digest(request: Request) -> str:
    """Digest of what a prompt's KV depends on: its token ids and its adapter."""
    digest = hashlib.sha256(b"pdcore prompt 1\0")
    digest.update(repr(request.lora).encode())
    digest.update(request.prompt_token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(int, values))


@attrs.frozen(kw_only=True)
class TicketContents:
    """Which KV a ticket stands for. Both sides work it out, and compare the digests.

    Args:
        block_ids: the blocks, in order of position.
        generations: one for each block, as the pool counts them.
        num_tokens: how many tokens have their KV in the blocks.
        block_size: tokens in a block.
        prompt_digest: `prompt_digest` of the prompt that the tokens are of.

    Raises:
        TransferError: the blocks and generations differ in number.
    """

    block_ids: tuple[int, ...] = attrs.field(converter=_ints)
    generations: tuple[int, ...] = attrs.field(converter=_ints)
    num_tokens: int
    block_size: int
    prompt_digest: str

    def __attrs_post_init__(self) -> None:
        if len(self.block_ids) != len(self.generations):
            raise TransferError(
                f"{len(self.block_ids)} blocks come with {len(self.generations)} generations: "
                "pass one for each"
            )

    @classmethod
    def of(cls, ticket: Any) -> TicketContents:
        """What a ticket stands for that has these fields among its own."""
        return cls(**{field.name: getattr(ticket, field.name) for field in attrs.fields(cls)})

    def digest(self) -> str:
        """64 hexadecimal digits of SHA-256. O(blocks)."""
        fields = (
            self.prompt_digest,
            self.num_tokens,
            self.block_size,
            self.block_ids,
            self.generations,
        )
        return hashlib.sha256(b"pdcore ticket 1\0" + repr(fields).encode()).hexdigest()
