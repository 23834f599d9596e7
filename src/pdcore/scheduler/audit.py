"""Looking at the whole state at once: audit, digest, and the search for a stall."""

from __future__ import annotations

import hashlib

import numpy as np

from pdcore.errors import InvariantBroken, SchedulerStalled
from pdcore.request import RequestStatus
from pdcore.scheduler.base import SkipCode
from pdcore.scheduler.core import Core

__all__ = ["audit", "fingerprint", "raise_if_stalled"]


def audit(core: Core) -> None:
    """Raise `InvariantBroken` for whatever contradicts itself. Cost: O(blocks + requests)."""
    table, manager = core.table, core.manager
    running = table.running
    manager.check(running)
    _audit_places(core)
    owned = [manager.tables.row_blocks(row) for row in running.tolist()]
    owned += [
        state.block_ids
        for state in core.requests.values()
        if state.row < 0 and state.block_ids is not None
    ]
    blocks = np.unique(np.concatenate([*owned, np.zeros(1, np.int32)]))
    num_referenced = manager.pool.counts().referenced
    if blocks.size - 1 != num_referenced:
        raise InvariantBroken(
            f"requests refer to {blocks.size - 1} blocks, but {num_referenced} have references"
        )
    counts = table.num_tokens[running], table.num_computed[running], table.num_in_flight[running]
    if any((column < 0).any() for column in counts):
        raise InvariantBroken("a row has a negative count")
    if (counts[1] > counts[0] + counts[2]).any():
        raise InvariantBroken("a row has computed more tokens than it has")
    if (manager.tables.num_blocks[running] * manager.block_size < counts[1]).any():
        raise InvariantBroken("a row has computed tokens without blocks for them")
    _audit_batch(core)
    _audit_keys(core)
    held = {id(hold) for hold in (*core.quarantine.holds, *core.handed_over.values())}
    if held != {id(hold) for hold in manager.pool.holds()}:
        raise InvariantBroken("the pool's holds are not those of hand-overs and quarantine")


def _audit_batch(core: Core) -> None:
    """What the table remembers of all its rows is still so."""
    table = core.table
    rows, batch = table.running, table.batch
    lacking = table.num_tokens[rows] + table.num_in_flight[rows] - table.num_computed[rows]
    ids = [table.state(row).request_id for row in rows.tolist()]
    faults = {
        "is_level": table.is_level and (lacking != 1).any(),
        "num_calm_steps": table.is_level and table.num_calm_steps > _num_calm_steps(core),
        "the batch's rows": batch.rows.tolist() != rows.tolist(),
        "the batch's epochs": batch.epochs.tolist() != table.epoch[rows].tolist(),
        "the batch's request ids": batch.request_ids != ids,
        "num_with_eos": table.num_with_eos != (table.eos[rows] >= 0).sum(),
        "num_with_stop_ids": table.num_with_stop_ids != table.has_stop_ids[rows].sum(),
        "num_with_matcher": table.num_with_matcher != table.has_matcher[rows].sum(),
        "num_to_refresh": table.num_to_refresh != table.needs_refresh[rows].sum(),
    }
    wrong = [name for name, is_wrong in faults.items() if is_wrong]
    if wrong:
        raise InvariantBroken(f"the table of running requests is wrong about {', '.join(wrong)}")


def _num_calm_steps(core: Core) -> int:
    """How many steps of a token each follow in which no row needs a block, fills one or ends."""
    table, tables = core.table, core.manager.tables
    rows, block_size = table.running, table.block_size
    computed = table.num_computed[rows]
    to_need = tables.num_blocks[rows] * block_size - computed
    to_fill = block_size - 1 - computed % block_size
    to_limit = table.limit[rows] - computed - 1
    return int(np.min((to_need, to_fill, to_limit), initial=block_size))


def _audit_keys(core: Core) -> None:
    """Every key that a running row's block has is that of the tokens it holds."""
    table, manager = core.table, core.manager
    if not manager.enable_prefix_caching:
        return
    for row in table.running.tolist():
        sequence, num_tokens = table.state(row).sequence, int(table.num_tokens[row])
        start = len(sequence)
        offset = start % table.block_size
        late = table.tail[row, offset : offset + num_tokens - start]
        tokens = np.concatenate((sequence.tokens(), late))
        root = manager.hasher.root(sequence.cache_salt, sequence.lora)
        expected = manager.hasher.chain(root, tokens, start=0)
        ids = manager.tables.row_blocks(row)[: len(expected)]
        for block, key, right in zip(ids.tolist(), manager.pool.keys(ids), expected, strict=False):
            if block and key is not None and key != right:
                raise InvariantBroken(f"block {block} of row {row} has the key of other tokens")


def _audit_places(core: Core) -> None:
    """Every unfinished request is in exactly the place that its status says."""
    running = set(core.table.running.tolist())
    for uid, state in core.requests.items():
        places = {
            RequestStatus.RUNNING: state.row in running and core.table.states[state.row] is state,
            RequestStatus.WAITING_FOR_REMOTE_KVS: uid in core.parked,
            RequestStatus.WAITING_FOR_GRAMMAR: uid in core.compiling,
            RequestStatus.WAITING: state in core.waiting or state in core.landed,
            RequestStatus.PREEMPTED: state in core.waiting,
        }
        if not places.get(state.status) or core.uids.get(state.request_id) != uid:
            raise InvariantBroken(f"request {state.request_id!r} is {state.status} but not there")
        num_places = sum((state.row in running, uid in core.parked, uid in core.compiling)) + sum(
            (state in core.waiting, state in core.landed)
        )
        if num_places != 1:
            raise InvariantBroken(f"request {state.request_id!r} is in {num_places} places")
    if len(core.requests) != (
        len(running) + len(core.parked) + len(core.compiling) + len(core.waiting) + len(core.landed)
    ):
        raise InvariantBroken("a place names a request that is finished")


def fingerprint(core: Core) -> bytes:
    """A digest of all that decides future plans; leaves out epochs, generations and counters."""
    table = core.table
    running = table.running
    digest = hashlib.blake2b(core.manager.fingerprint(running), digest_size=16)
    digest.update(table.fingerprint())
    for queue in (core.waiting, core.landed):
        digest.update(repr([(state.uid, state.queue_key) for state in queue]).encode())
    for uid, state in sorted(core.requests.items()):
        facts = (
            uid,
            state.status,
            state.row,
            len(state.sequence) if state.row < 0 else 0,
            None if state.block_ids is None else state.block_ids.tolist(),
            state.num_computed_tokens,
            state.ask_connector,
            state.num_late_tokens,
            state.num_preemptions,
        )
        digest.update(repr(facts).encode())
    holds = (list(core.quarantine), list(core.handed_over), core.finished_rows)
    digest.update(repr(holds).encode())
    return digest.digest()


_OUTSIDE = {
    SkipCode.WAITING_FOR_OUTPUT,
    SkipCode.WAITING_FOR_GRAMMAR,
    SkipCode.WAITING_FOR_REMOTE_KVS,
    SkipCode.TOO_MANY_PARKED,
    SkipCode.CONNECTOR_NOT_READY,
    SkipCode.POLICY,
    SkipCode.ADMISSION_CLOSED,
}


def raise_if_stalled(core: Core) -> None:
    """Raise `SchedulerStalled` when work exists, the last plan had none, and nothing is awaited."""
    if not (len(core.table) or len(core.waiting) or len(core.landed)):
        return
    awaited = (
        core.in_flight
        or core.parked
        or core.compiling
        or core.handed_over
        or core.quarantine
        or core.failing
        or any(skip.code in _OUTSIDE for skip in core.skips.values())
    )
    if awaited:
        return
    queue = ", ".join(
        f"{state.request_id!r} ({state.status.value}, {len(state.sequence)} tokens)"
        for state in list(core.waiting)[:10]
    )
    raise SchedulerStalled(
        f"no step can advance: {len(core.table)} running, {len(core.waiting)} waiting "
        f"(first: {queue or 'none'}), {core.manager.pool}, "
        f"last refusals: {list(core.skips.values())[:3]}"
    )
