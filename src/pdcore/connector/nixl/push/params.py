"""`push_to`: what a decode engine tells a prefill engine that is to send KV ahead."""

from __future__ import annotations

from typing import ClassVar, Final

import attrs

from pdcore.connector.nixl import checked
from pdcore.connector.nixl.peer_params import PeerParams, as_tuple
from pdcore.connector.nixl.signing import PlainForm

__all__ = ["PUSH_TO", "PushParams"]

PUSH_TO: Final = "push_to"
"""The field of a prefill's ``kv_transfer_params`` that holds them."""

_VERSION = 1
_MAX_NUM_SLOTS = 1 << 20


@attrs.frozen(kw_only=True)
class PushParams(PeerParams):
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

    form: ClassVar[PlainForm] = PlainForm(
        name=PUSH_TO,
        flag="expects_push",
        version=_VERSION,
        origin="the decode engine's expect_push()",
        misfit=(
            "push_to must be what the decode engine's expect_push() returned: a mapping with "
            "expects_push=True, or None for no push"
        ),
        mix_up=(
            "push_to belongs to another prompt: pass the same prompt_token_ids and lora to "
            "expect_push() and to the prefill engine"
        ),
    )

    push_id: str = attrs.field(validator=checked.text())
    slots: tuple[int, ...] = attrs.field(
        converter=as_tuple, validator=checked.int_list(2**31 - 1, max_length=_MAX_NUM_SLOTS)
    )
    version: int = attrs.field(default=_VERSION, validator=checked.integer(_VERSION, _VERSION))

    def __attrs_post_init__(self) -> None:
        if not self.slots or len(set(self.slots)) != len(self.slots):
            raise ValueError("slots is empty, or names a slot twice")
