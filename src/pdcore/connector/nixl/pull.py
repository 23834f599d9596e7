"""One ticket in the hands of a decode engine, from the arrival of its request to its end."""

from __future__ import annotations

import enum

import attrs
import numpy as np

from pdcore.connector.base import KVLoad
from pdcore.connector.nixl.driver import AcceptAnswered, TicketDriver
from pdcore.connector.nixl.meta import PeerInfo, ReadTask
from pdcore.connector.nixl.params import TransferParams
from pdcore.errors import TransferError
from pdcore.messages import TransferKey
from pdcore.request import Request

__all__ = ["Pull", "PullState"]


class PullState(enum.Enum):
    """Where a ticket's load is."""

    WAITING = "waits to be admitted"
    """No load was asked for, or the last one failed in a way that allows another."""
    SHAKING_HANDS = "waits for the handshake"
    """Its blocks are there; the peer's memory is not known yet."""
    POSTED = "is to be read with the next step"
    """The next plan carries it to the workers."""
    READING = "is being read"
    """The workers have it."""
    ACCEPTING = "was read and waits to be accepted"
    """All data is here; the peer is asked to vouch for it."""
    DONE = "is done with"
    """The ticket was used, or given up."""


@attrs.define(eq=False, kw_only=True)
class Pull:
    """One ticket and its load. The scheduler's thread owns it.

    Args:
        uid: the request's internal number.
        request: the request.
        params: its ticket.
        driver: keeps the ticket alive, on the control thread.
        state: where its load is.
        peer: the peer's KV memory, once known.
        trouble: why the ticket can never be read, or empty.
        load: the newest load, or None.
        num_attempts: how many loads there were.
        is_cancelled: whether nobody wants the newest load any more.
        is_live: whether the request is unfinished.
        is_returned: whether the ticket was used, or the peer was told that it will not be.
        is_asked: whether the peer was asked to vouch before the newest load was reported.
        word: what it said before the newest load was reported, or None.
    """

    uid: int
    request: Request
    params: TransferParams
    driver: TicketDriver
    state: PullState = PullState.WAITING
    peer: PeerInfo | None = None
    trouble: str = ""
    load: KVLoad | None = None
    num_attempts: int = 0
    is_cancelled: bool = False
    is_live: bool = True
    is_returned: bool = False
    is_asked: bool = False
    word: AcceptAnswered | None = None

    @property
    def transfer(self) -> TransferKey | None:
        return None if self.load is None else self.load.transfer

    def num_tokens_beyond(self, num_local_tokens: int) -> int:
        """How many tokens the ticket can bring; the last prompt token is always computed here."""
        if self.state is not PullState.WAITING or self.is_returned:
            return 0
        if self.trouble and self.num_attempts:
            return 0
        # With trouble and no attempt yet, the load is offered all the same: it then fails with its
        # cause, and the application's rule for failed loads is what decides.
        usable = min(self.params.num_tokens, self.request.num_prompt_tokens - 1)
        return max(0, usable - num_local_tokens)

    def check(self, load: KVLoad, *, block_size: int) -> None:
        """Raise `TransferError` if the ticket cannot fill the blocks of a load, which have
        ``block_size`` tokens."""
        end = load.num_local_tokens + load.num_external_tokens
        num_blocks = -(-end // block_size) - load.num_local_tokens // block_size
        is_aligned = load.num_local_tokens % block_size == 0
        if not is_aligned or end > self.params.num_tokens or num_blocks > load.block_ids.size:
            raise TransferError(
                f"{load.num_external_tokens} tokens after {load.num_local_tokens} local ones "
                f"cannot be loaded into {load.block_ids.size} blocks of {block_size} from a "
                f"ticket of {self.params.num_tokens} tokens: is NixlConfig.block_size the pool's?"
            )

    def read_task(self, staged: tuple[int, ...] = ()) -> ReadTask:
        """What the workers are to do for the newest load.

        Args:
            staged: slots of this engine's staging memory that hold the prompt's first blocks.

        By position: block i of the prompt here is read from block i of the prompt there, unless
        the peer is of another shape.
        """
        load, params = self.load, self.params
        assert load is not None
        assert self.peer is not None
        first = load.num_local_tokens // params.block_size
        end = -(-(load.num_local_tokens + load.num_external_tokens) // params.block_size)
        local_ids = np.array(load.block_ids, dtype=np.int32)
        remote_ids = np.array(params.block_ids[first:end], dtype=np.int32)
        slots = None
        if not self.peer.must_reshape:
            local_ids = local_ids[: end - first]
            exists = (local_ids != 0) & (remote_ids != 0)  # block 0 stands for "no longer needed"
            if staged:
                slots = np.full(end - first, -1, dtype=np.int32)
                here = staged[first:end]
                slots[: len(here)] = here
                slots = slots[exists]
            local_ids, remote_ids = local_ids[exists], remote_ids[exists]
        return ReadTask(
            transfer=load.transfer,
            peer=self.peer,
            local_block_ids=local_ids,
            remote_block_ids=remote_ids,
            num_local_tokens=load.num_local_tokens,
            num_external_tokens=load.num_external_tokens,
            staged_slots=slots,
        )
