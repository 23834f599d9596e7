"""Starting the requests that a step admits: rows and keys, and most blocks, for all at once."""

from __future__ import annotations

import operator

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.manager import PrefixHit
from pdcore.kvcache.sequence import TokenSequence
from pdcore.request import RequestStatus
from pdcore.scheduler.core import Core
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.state import RequestState, move, move_back

__all__ = ["Starting"]

BlockIds = npt.NDArray[np.int32]

_NO_BLOCKS = np.zeros(0, np.int32)

# What a start changes of a request.
_Before = tuple[BlockIds | None, int, int, bool]
_before = operator.attrgetter(
    "block_ids", "num_computed_tokens", "num_cached_tokens", "was_admitted"
)


@attrs.define(eq=False)
class _Admitted:
    """Admitted requests as columns, in order; see `Starting.add`."""

    states: list[RequestState] = attrs.field(factory=list)
    blocks: list[BlockIds] = attrs.field(factory=list)
    num_computed: list[int] = attrs.field(factory=list)
    num_tokens: list[int] = attrs.field(factory=list)
    num_hit_tokens: list[int] = attrs.field(factory=list)
    num_published: list[int] = attrs.field(factory=list)


class Starting:
    """What was admitted and has no row yet.

    Admitting one request costs the same array operations as admitting many, so they are collected,
    and started together when the pass ends. Nobody may tell the difference: `find_hit` sees the
    cache as if all had started, blocks that are taken for a hit come after theirs, and whoever
    looks at rows calls `run` before.

    Args:
        core: the scheduler's state.
        plan: where to put those that start.

    Attributes:
        num_blocks: how many blocks those that wait here have yet to take from the pool; none once
            `find_hit` has found something.
    """

    def __init__(self, core: Core, plan: Plan) -> None:
        self._core = core
        self._plan = plan
        self._admitted = _Admitted()
        # Those without blocks: their places, and how many each is to have.
        self._without_blocks: list[tuple[int, int]] = []
        # What they will publish.
        self._keys_to_come: set[bytes] = set()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._admitted.states)

    def add(
        self,
        state: RequestState,
        *,
        num_tokens: int,
        blocks: BlockIds = _NO_BLOCKS,
        num_fresh_blocks: int = 0,
        num_computed: int = 0,
        num_hit_tokens: int = 0,
        num_published: int = 0,
    ) -> None:
        """Admit a request; there must be room for it.

        Args:
            state: the request.
            num_tokens: tokens to compute in this step.
            blocks: int32, those it has.
            num_fresh_blocks: how many must be allocated for it, if it has none.
            num_computed: tokens whose KV is there.
            num_hit_tokens: tokens found in the local cache.
            num_published: blocks that have their keys already.
        """
        admitted = self._admitted
        if num_fresh_blocks:
            assert not blocks.size
            self._without_blocks.append((len(admitted.states), num_fresh_blocks))
            self.num_blocks += num_fresh_blocks
        admitted.states.append(state)
        admitted.blocks.append(blocks)
        admitted.num_computed.append(num_computed)
        admitted.num_tokens.append(num_tokens)
        admitted.num_hit_tokens.append(num_hit_tokens)
        admitted.num_published.append(num_published)
        end = (num_computed + num_tokens) // self._core.manager.block_size
        self._keys_to_come.update(state.sequence.keys[num_published:end])
        self._plan.token_budget -= num_tokens

    def find_hit(self, sequence: TokenSequence) -> PrefixHit:
        """What the cache has of a sequence, as if all that wait here had been started."""
        manager = self._core.manager
        hit = manager.get_computed_blocks(sequence)
        if hit.num_tokens and self.num_blocks:
            # Their blocks may evict what was found.
            self._allocate()
            hit = manager.get_computed_blocks(sequence)
        end = hit.block_ids.size
        if (
            self._keys_to_come
            and end < manager.max_hit_blocks(sequence)
            and sequence.keys[end] in self._keys_to_come
        ):
            self.run()
            hit = manager.get_computed_blocks(sequence)
        return hit

    def _allocate(self) -> None:
        """Give blocks to all, in order; rows and keys come with `run`."""
        if self.num_blocks:
            fresh, end = self._core.manager.pool.allocate(self.num_blocks), 0
            for place, num_blocks in self._without_blocks:
                begin, end = end, end + num_blocks
                self._admitted.blocks[place] = fresh[begin:end]
            self._without_blocks.clear()
            self.num_blocks = 0

    def run(self) -> None:
        """Give rows, blocks and keys to all, in order."""
        self._allocate()
        admitted = self._admitted
        states, blocks = admitted.states, admitted.blocks
        if not states:
            return
        core, plan = self._core, self._plan
        self._admitted = _Admitted()
        self._keys_to_come.clear()
        rows = core.table.assign(states, admitted.num_computed, step=plan.step_id)
        befores = self._begin(admitted)
        core.record(lambda: self._take_back(admitted, rows, befores))
        plan.admitted_rows += rows
        plan.admitted_tokens += admitted.num_tokens
        plan.admitted_blocks += blocks
        core.manager.bind(
            rows,
            blocks,
            [state.sequence for state in states],
            num_published=admitted.num_published,
            num_tokens=list(map(operator.add, admitted.num_computed, admitted.num_tokens)),
            step=plan.step_id,
        )

    def _begin(self, admitted: _Admitted) -> list[_Before]:
        """Make the requests running ones, and count what the prefix cache had of them."""
        befores = list(map(_before, admitted.states))
        for state, num_hit_tokens in zip(admitted.states, admitted.num_hit_tokens, strict=True):
            state.block_ids = None
            state.num_computed_tokens = 0
            if not state.was_admitted:
                state.num_cached_tokens = num_hit_tokens
                state.was_admitted = True
            move(state, RequestStatus.RUNNING)
        self._count_hits(admitted, 1)
        return befores

    def _count_hits(self, admitted: _Admitted, sign: int) -> None:
        if self._core.manager.enable_prefix_caching:
            counters = self._core.counters
            num_tokens = sum([len(state.sequence) for state in admitted.states])
            counters.num_prefix_queried_tokens += sign * num_tokens
            counters.num_prefix_hit_tokens += sign * sum(admitted.num_hit_tokens)

    def _take_back(self, admitted: _Admitted, rows: list[int], befores: list[_Before]) -> None:
        self._core.table.take_back(rows)
        self._count_hits(admitted, -1)
        for state, before in zip(admitted.states, befores, strict=True):
            move_back(state)
            (
                state.block_ids,
                state.num_computed_tokens,
                state.num_cached_tokens,
                state.was_admitted,
            ) = before
