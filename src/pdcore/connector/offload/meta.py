"""What the two halves of the offload connector tell each other."""

from __future__ import annotations

import attrs

from pdcore.messages import TransferKey

__all__ = ["LoadOrder", "OffloadHandshake", "OffloadMeta", "Place", "SaveOrder"]


@attrs.frozen
class Place:
    """Where a saved block is.

    Args:
        key: its name.
        slot: of host memory, or of the disk.
        is_on_disk: which of them.
    """

    key: bytes
    slot: int
    is_on_disk: bool


@attrs.frozen
class SaveOrder:
    """Copy a block into a slot of host memory before the step overwrites it; then to disk.

    Args:
        block_id: of the pool.
        host_slot: where it goes.
        disk_slot: where a copy goes on disk, in its own time; -1 for none. A copy that is not made
            before the slot in host memory gets another block is never made.
        key: the block's name.
    """

    block_id: int
    host_slot: int
    disk_slot: int
    key: bytes


@attrs.frozen(kw_only=True)
class LoadOrder:
    """Copy saved blocks back.

    Args:
        transfer: which load.
        num_local_tokens: tokens before the first of the blocks.
        block_size: tokens in each.
        block_ids: where the blocks go, in order of position.
        places: where each is saved.
    """

    transfer: TransferKey
    num_local_tokens: int
    block_size: int
    block_ids: tuple[int, ...]
    places: tuple[Place, ...]


@attrs.frozen(kw_only=True)
class OffloadMeta:
    """A step's orders.

    Args:
        num_resets: how often the cache was reset; what was saved before the last time is void.
        saves: done before `WorkerConnector.start_save_kv` returns.
        loads: asynchronous.
        cancelled: loads that nobody wants any more; each is reported, if it was not yet.
    """

    num_resets: int = 0
    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    cancelled: tuple[TransferKey, ...] = ()


@attrs.frozen(kw_only=True)
class OffloadHandshake:
    """What a worker's half tells the scheduler's once it knows the KV memory.

    Args:
        num_blocks, bytes_per_block: of one rank's KV memory.
        num_host_slots, num_disk_slots: how many blocks fit into each tier.
        stored: what an earlier engine left on disk: (slot, key), oldest first.
    """

    num_blocks: int
    bytes_per_block: int
    num_host_slots: int
    num_disk_slots: int
    stored: tuple[tuple[int, bytes], ...] = ()
