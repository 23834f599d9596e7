"""Loads of KV from elsewhere: which blocks they fill, and what holds them until they are done."""

from __future__ import annotations

import numpy as np

from pdcore.connector.base import ExternalMatch, KVLoad
from pdcore.errors import OutOfBlocks
from pdcore.kvcache.manager import PrefixHit
from pdcore.messages import TransferKey
from pdcore.request import RequestStatus
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail_later
from pdcore.scheduler.state import RequestState, move, move_back
from pdcore.scheduler.waiting import WaitingTable

__all__ = ["Loading"]


class Loading:
    """Starts loads: those that a request waits for without a row, and those that are done in time
    for the step that starts it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def park(
        self,
        state: RequestState,
        queue: WaitingTable,
        hit: PrefixHit,
        match: ExternalMatch,
    ) -> Skip | None:
        """Give a request the blocks that its load fills, and start the load."""
        core, manager = self._core, self._core.manager
        if len(core.parked) >= core.limits.max_num_parked:
            return Skip(
                code=SkipCode.TOO_MANY_PARKED,
                needed=1,
                available=0,
                waits_on="another request's remote KV",
            )
        num_computed = hit.num_tokens + match.num_tokens
        try:
            blocks = manager.allocate_slots(
                hit,
                num_computed,
                must_fit_tokens=len(state.sequence),
                chunk=core.limits.max_num_batched_tokens,
                num_reserved=self._num_reserved_blocks(),
            )
        except OutOfBlocks as error:
            return Skip(code=SkipCode.NO_BLOCKS, needed=error.needed, available=error.available)
        load = self.begin(state, hit, blocks, match.num_tokens)
        if isinstance(load, Skip):
            return load
        self._core.leave(state, queue)
        before = (state.block_ids, state.num_computed_tokens, state.num_local_tokens)
        state.block_ids = blocks
        state.num_computed_tokens = num_computed
        state.num_local_tokens = hit.num_tokens
        move(state, RequestStatus.WAITING_FOR_REMOTE_KVS)
        core.parked[state.uid] = state
        core.alarms.set(("load", load.transfer), load.deadline)

        def undo() -> None:
            core.alarms.cancel(("load", load.transfer))
            del core.parked[state.uid]
            move_back(state)
            state.load = None
            state.block_ids, state.num_computed_tokens, state.num_local_tokens = before

        core.record(undo)
        return None

    def begin(
        self, state: RequestState, hit: PrefixHit, blocks: np.ndarray, num_external: int
    ) -> KVLoad | Skip:
        """Tell the connector to load into a request's blocks; if it fails, they are released."""
        core, connector = self._core, self._core.connector
        assert connector is not None
        start, end = hit.block_ids.size, core.manager.blocks_for(hit.num_tokens + num_external)
        load = KVLoad(
            transfer=TransferKey(state.uid, state.attempt + 1),
            request=state.request,
            num_local_tokens=hit.num_tokens,
            num_external_tokens=num_external,
            block_ids=blocks[start:end],
            deadline=core.clock.now() + core.limits.load_timeout_s,
        )
        try:
            connector.update_state_after_alloc(state.request, load)
        except Exception as error:
            core.manager.pool.release(blocks[::-1])
            return fail_later(self._core, state, "update_state_after_alloc", error)
        # Never counted back, so that no two loads have one name.
        state.attempt += 1
        state.load, state.load_step = load, core.step_id
        core.record(lambda: self._undo(state, load))
        return load

    def _undo(self, state: RequestState, load: KVLoad) -> None:
        """Tell the connector that a load does not begin; and if that fails, to call it off."""
        core = self._core
        assert core.connector is not None
        try:
            core.connector.undo_alloc(state.request, load)
        except Exception as error:
            core.complain("the connector's undo_alloc() raised", error)
            fail_later(core, state, "undo_alloc", error)
            core.call_off(load.transfer)

    def within_step(self, state: RequestState, load: KVLoad, num_tokens: int) -> None:
        """Note a load that is done when the step's result is in, and count its tokens."""
        core = self._core
        step_id = core.step_id
        core.synchronous_loads.setdefault(step_id, []).append((state, load.transfer))
        state.num_external_tokens += num_tokens
        core.counters.num_external_tokens += num_tokens

        def undo() -> None:
            core.synchronous_loads.pop(step_id, None)
            state.num_external_tokens -= num_tokens
            core.counters.num_external_tokens -= num_tokens

        core.record(undo)

    def roll_back_landed(self) -> bool:
        """Take the blocks of the loaded request that is last in order, so that others can go on.

        Called when nothing can run though several loaded requests hold blocks. The request is
        computed anew, from whatever is still cached.
        """
        core = self._core
        if len(core.landed) < 2:
            return False
        state = list(core.landed)[-1]
        before = (state.block_ids, state.num_computed_tokens, state.ask_connector)
        core.restart(state)
        state.ask_connector = False

        def undo() -> None:
            core.waiting.remove(state)
            state.block_ids, state.num_computed_tokens, state.ask_connector = before
            core.landed.put_back(state)

        core.record(undo)
        return True

    def _num_reserved_blocks(self) -> int:
        """Blocks that loads under way will need to go on once they are done."""
        core = self._core
        reserved = 0
        for state in (*core.parked.values(), *core.landed):
            assert state.block_ids is not None
            total = core.manager.max_blocks_for(
                len(state.sequence), chunk=core.limits.max_num_batched_tokens
            )
            reserved += max(total - state.block_ids.size, 0)
        return reserved
