"""Whether two engines can exchange KV, and how: decided once, at the handshake."""

from __future__ import annotations

from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.meta import RankEndpoint
from pdcore.errors import HandshakeRefused

__all__ = ["must_reshape"]

Endpoints = tuple[RankEndpoint, ...]


def must_reshape(
    where: str,
    *,
    theirs: Endpoints,
    ours: Endpoints,
    their_block_size: int,
    our_block_size: int,
) -> bool:
    """Whether KV must be rearranged on its way; False if blocks are the same byte for byte.

    Args:
        where: what to call the peer.
        theirs, ours: the ranks of both engines.
        their_block_size, our_block_size: tokens in a block.

    Raises:
        HandshakeRefused: KV cannot be exchanged; the message says what differs.
    """
    if not ours:
        raise HandshakeRefused(
            "this engine does not know its own KV memory: pass set_xfer_handshake_metadata what "
            "each worker's get_handshake_metadata returned, before the first request"
        )
    if their_block_size == our_block_size and _are_same(theirs, ours):
        return False
    their, our = _layouts(where, theirs), _layouts("this engine", ours)
    if not their or not our:
        _refuse_as_bytes(where, theirs, ours, their_block_size, our_block_size)
    for side, layouts, endpoints, block_size in (
        (where, their, theirs, their_block_size),
        ("this engine", our, ours, our_block_size),
    ):
        _check_ranks(side, layouts, endpoints, block_size)
    _check_models(where, their[0], our[0])
    _must_divide("block sizes", where, their_block_size, our_block_size)
    _must_divide("numbers of ranks", where, len(their), len(our))
    _must_equal(
        "numbers of KV heads", where, their[0].total_num_kv_heads, our[0].total_num_kv_heads
    )
    return True


def _are_same(theirs: Endpoints, ours: Endpoints) -> bool:
    return len(theirs) == len(ours) and all(
        their.fingerprint == our.fingerprint
        and their.layout == our.layout
        and their.region.bytes_per_block == our.region.bytes_per_block
        for their, our in zip(theirs, ours, strict=True)
    )


def _layouts(where: str, endpoints: Endpoints) -> tuple[KVLayout, ...]:
    layouts = tuple(end.layout for end in endpoints if end.layout is not None)
    if layouts and len(layouts) != len(endpoints):
        raise HandshakeRefused(f"only some ranks of {where} describe their KV's layout")
    return layouts


def _refuse_as_bytes(
    where: str, theirs: Endpoints, ours: Endpoints, their_block_size: int, our_block_size: int
) -> None:
    """One of the engines does not say how its blocks are laid out, so they must be equal."""
    _must_equal("block sizes", where, their_block_size, our_block_size)
    _must_equal("numbers of ranks", where, len(theirs), len(ours))
    for their, our in zip(theirs, ours, strict=True):
        _must_equal("KV caches", where, their.fingerprint, our.fingerprint)
        _must_equal(
            "bytes in a block", where, their.region.bytes_per_block, our.region.bytes_per_block
        )
    raise HandshakeRefused(
        f"of {where} and this engine only one describes its KV's layout: "
        "pass KVCaches(layout=...) on both or on neither"
    )


def _check_ranks(
    where: str, layouts: tuple[KVLayout, ...], endpoints: Endpoints, block_size: int
) -> None:
    """The ranks of one engine must be what they say, and equal but for their number."""
    first = layouts[0]
    for rank, (layout, endpoint) in enumerate(zip(layouts, endpoints, strict=True)):
        is_in_order = (layout.tp_rank, layout.tp_size) == (rank, len(layouts))
        is_like_first = _shape(layout) == _shape(first) and layout.model == first.model
        is_true = (layout.bytes_per_block, layout.block_size) == (
            endpoint.region.bytes_per_block,
            block_size,
        )
        if not (is_in_order and is_like_first and is_true):
            raise HandshakeRefused(
                f"rank {rank} of {where} describes a KV layout that does not fit its "
                f"{len(layouts)} ranks, blocks of {block_size} tokens and "
                f"{endpoint.region.bytes_per_block} bytes: {layout}"
            )
        if endpoint.region.mem_type != "DRAM":
            raise HandshakeRefused(
                f"{where} has its KV in {endpoint.region.mem_type}: engines of unequal shapes can "
                "exchange KV in host memory only. Run both with the same block size and number of "
                "ranks"
            )


def _shape(layout: KVLayout) -> tuple[object, ...]:
    return (
        layout.dtype,
        layout.element_size,
        layout.num_layers,
        layout.num_components,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )


def _check_models(where: str, their: KVLayout, our: KVLayout) -> None:
    _must_equal("models", where, their.model, our.model)
    _must_equal("dtypes", where, their.dtype, our.dtype)
    _must_equal("element sizes", where, their.element_size, our.element_size)
    _must_equal("numbers of layers", where, their.num_layers, our.num_layers)
    _must_equal("entries for a token", where, their.num_components, our.num_components)
    _must_equal("head sizes", where, their.head_dim, our.head_dim)


def _must_equal(what: str, where: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise HandshakeRefused(
            f"{where} and this engine have different {what}: {theirs!r} there, {ours!r} here. "
            "Run both with the same model, dtype, block size and number of ranks"
        )


def _must_divide(what: str, where: str, theirs: int, ours: int) -> None:
    if max(theirs, ours) % min(theirs, ours):
        raise HandshakeRefused(
            f"{where} and this engine have {what} of which neither divides the other: {theirs} "
            f"there, {ours} here. Make one a multiple of the other"
        )
