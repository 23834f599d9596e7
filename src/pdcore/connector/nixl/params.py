"""`kv_transfer_params`: what a prefill engine tells a decode engine, by way of others.

They pass through routers and clients, so they are taken for what they are: words of a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import attrs

from pdcore.connector.nixl import checked
from pdcore.connector.nixl.peer_params import PeerParams, as_tuple
from pdcore.connector.nixl.signing import PlainForm
from pdcore.connector.ticket_contents import TicketContents

__all__ = ["PARAMS_VERSION", "TransferParams"]

PARAMS_VERSION: Final = 1
_MAX_NUM_BLOCKS = 1 << 20
_MAX_NUM_TOKENS = 1 << 31


@attrs.frozen(kw_only=True)
class TransferParams(PeerParams):
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
        push_id: the push that sent parts of it ahead, or empty.
        version: of this format.

    Raises:
        ValueError: a field is not what it should be; `from_dict` makes it `InvalidTransferParams`.
    """

    form: ClassVar[PlainForm] = PlainForm(
        name="kv_transfer_params",
        flag="do_remote_prefill",
        version=PARAMS_VERSION,
        origin="the prefill engine",
        misfit=(
            "kv_transfer_params must be a mapping with do_remote_prefill=True (to read KV from a "
            "prefill engine) or do_remote_decode=True (to prefill for a decode engine)"
        ),
        mix_up=(
            "kv_transfer_params belong to another prompt: pass the ticket with the same "
            "prompt_token_ids and lora that the prefill engine had"
        ),
    )

    transfer_id: str = attrs.field(validator=checked.text())
    block_ids: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=checked.int_list(2**31 - 1, max_length=_MAX_NUM_BLOCKS)
    )
    generations: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=checked.int_list(2**63 - 1, max_length=_MAX_NUM_BLOCKS)
    )
    num_tokens: int = attrs.field(validator=checked.integer(1, _MAX_NUM_TOKENS))
    fingerprint: str = attrs.field(validator=checked.text(max_length=1024, allow_empty=True))
    tp_size: int = attrs.field(validator=checked.integer(1, 4096))
    push_id: str = attrs.field(default="", validator=checked.text(allow_empty=True))
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
    def contents(self) -> TicketContents:
        """What the ticket stands for."""
        return TicketContents.of(self)

    @classmethod
    def look_like(cls, data: Mapping[str, Any]) -> bool:
        """Whether a stranger's parameters may be such: other connectors' name their kind."""
        return data.get(cls.form.flag) is True and "kind" not in data
