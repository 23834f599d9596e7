"""What the two halves of the NIXL connector tell each other. All of it is frozen and picklable."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.messages import TransferKey

__all__ = [
    "Doorbell",
    "NixlMeta",
    "PeerCutOff",
    "PeerInfo",
    "PushStop",
    "PushTask",
    "RankEndpoint",
    "ReadTask",
]


@attrs.frozen(kw_only=True)
class RankEndpoint:
    """How to reach the KV memory of one rank.

    Args:
        agent_metadata: what NIXL's agent says of itself.
        region: its KV memory.
        fingerprint: model, dtype and layout, as the runner describes them.
        layout: what its bytes mean, or None if the runner does not say.
    """

    agent_metadata: bytes = attrs.field(repr=False)
    region: MemoryRegion
    fingerprint: str
    layout: KVLayout | None = None


@attrs.frozen(kw_only=True)
class Doorbell:
    """Where one half of an engine's connector listens for the other: an address and a secret.

    It stays within the engine; no peer is told.
    """

    host: str
    port: int
    token: bytes = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class PeerInfo:
    """An engine to read from, as its handshake described it.

    Args:
        peer_id: engine and epoch; a restarted engine has another one.
        name: what to call it in messages to people.
        ranks: its memory, by rank.
        block_size: tokens in one of its blocks; 0 where they are like this engine's.
    """

    peer_id: str
    name: str
    ranks: tuple[RankEndpoint, ...]
    block_size: int = 0

    @property
    def must_reshape(self) -> bool:
        """Whether its blocks or ranks are of another size, so that KV is rearranged."""
        return self.block_size > 0


@attrs.frozen(kw_only=True, eq=False)
class ReadTask:
    """One load for the workers: the i-th remote block goes into the i-th local one.

    If the peer is of another shape, the blocks are those from token ``num_local_tokens`` on, each
    side's in its own block size, and the numbers of tokens say what goes where.

    Args:
        transfer: names the load.
        peer: whom to read from.
        local_block_ids, remote_block_ids: int32, of equal length, in order of position.
        num_local_tokens: how many tokens are good if the read fails.
        num_external_tokens: how many tokens after them the load brings.
        staged_slots: int32, one for each block: the slot of this engine's own staging memory that
            holds it, or -1 where it must be read. None means that all must be.
    """

    transfer: TransferKey
    peer: PeerInfo
    local_block_ids: npt.NDArray[np.int32]
    remote_block_ids: npt.NDArray[np.int32]
    num_local_tokens: int
    num_external_tokens: int = 0
    staged_slots: npt.NDArray[np.int32] | None = None


@attrs.frozen(kw_only=True, eq=False)
class PushTask:
    """Blocks that are complete once this step's forward pass is done, to be sent to a peer.

    Args:
        push_id: the push.
        attempt: counts how often it began anew.
        peer: its ``ranks`` are the peer's staging memory.
        first: position of the first block in the prompt.
        block_ids, slots: int32, of equal length: the i-th block goes into the i-th slot.
    """

    push_id: str
    attempt: int
    peer: PeerInfo
    first: int
    block_ids: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]


@attrs.frozen(kw_only=True)
class PushStop:
    """An order to end a push: report it as soon as nothing of it is written any more.

    Args:
        push_id: the push.
        is_wanted: whether what was ordered before should still be sent.
    """

    push_id: str
    is_wanted: bool


@attrs.frozen(kw_only=True)
class PeerCutOff:
    """An order to stop every read from a peer by force."""

    peer_id: str
    cause: str


@attrs.frozen(kw_only=True, eq=False)
class NixlMeta:
    """What the workers must hear in one step. An empty one asks for their report, no more.

    Args:
        reads: loads to start.
        cancels: loads that nobody wants any more.
        cut_offs: peers to let go of.
        doorbell: where to say that a load or push ended, or that a read needs its peer, so that
            nobody need ask; None says nothing.
        pushes: blocks to send once the step's forward pass is done.
        push_stops: pushes to end.
    """

    reads: tuple[ReadTask, ...] = ()
    cancels: tuple[TransferKey, ...] = ()
    cut_offs: tuple[PeerCutOff, ...] = ()
    doorbell: Doorbell | None = None
    pushes: tuple[PushTask, ...] = ()
    push_stops: tuple[PushStop, ...] = ()
