"""What the tests of pushes share: engines for both sides, and a wire that can be held up."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from nixl_engines import LIMIT_S
from nixl_whole_engine import BLOCK_SIZE, NUM_BLOCKS, WholeEngine, prompts, run_until

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.stats import LandingCounts, PushCounts
from pdcore.errors import PeerLost
from pdcore.request import Request

BYTES_PER_SLOT = 8 * BLOCK_SIZE
CHUNK = 8
PROMPT = prompts(1, seed=1, shared=40)[0]

WHOLE_ENGINES = [
    pytest.mark.nixl,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_errors"),
]
"""What to mark tests with in which whole engines run: what they log as an error is one."""


class SlowWire:
    """Holds up every write of this process, as a congested network does, until `clear`.

    Attributes:
        num_posted: how many writes were begun.
        breaks_at: which of them fails, counted from 1; 0 for none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_clear = threading.Event()
        self.num_posted = self.breaks_at = 0
        post_write = TransferAgent.post_write

        def post_later(agent: TransferAgent, *ids: Any) -> Any:
            self.num_posted += 1
            number = self.num_posted
            assert self._is_clear.wait(30)
            if number == self.breaks_at:
                raise PeerLost("the wire broke")
            return post_write(agent, *ids)

        monkeypatch.setattr(TransferAgent, "post_write", post_later)

    def clear(self) -> None:
        self._is_clear.set()


def prefill_engine(**config: Any) -> WholeEngine:
    """An engine that computes prompts eight tokens at a time."""
    limits = {"max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
    return WholeEngine(limits=limits, **config)


def decode_engine(*, num_slots: int = 32, **config: Any) -> WholeEngine:
    """An engine with staging memory."""
    return WholeEngine(push_staging_bytes=num_slots * BYTES_PER_SLOT, **config)


def expect(engine: WholeEngine, prompt: list[int]) -> dict[str, Any]:
    """Leave to push a prompt."""
    push_to = engine.connector.expect_push(Request("any", prompt))
    assert push_to is not None
    return push_to


def begin(engine: WholeEngine, name: str, prompt: list[int], push_to: dict[str, Any]) -> None:
    """Give a prompt to a prefill engine, and see its leave to push taken or refused."""
    before = pushes(engine)
    engine.scheduler.pause()
    engine.add(name, prompt, max_tokens=1, params={"do_remote_decode": True, "push_to": push_to})

    def is_decided() -> bool:
        now = pushes(engine)
        return now.num_started + now.num_refused > before.num_started + before.num_refused

    run_until(is_decided, engine)
    engine.scheduler.resume()


def finish(engine: WholeEngine, name: str, *beside: WholeEngine) -> dict[str, Any]:
    """Let a prefill end; return its ticket."""
    run_until(lambda: name in engine.ends, engine, *beside)
    params = engine.ends[name].kv_transfer_params
    assert params is not None
    return params


def decodes(
    engine: WholeEngine, name: str, prompt: list[int], params: dict[str, Any], *beside: WholeEngine
) -> None:
    """Give a ticket to a decode engine, and see the tokens of a solo run come out."""
    request = engine.add(name, prompt, max_tokens=9, params=params)
    run_until(lambda: name in engine.ends, engine, *beside)
    assert engine.tokens[name] == engine.runner.solo_tokens(request), engine.ends[name]


def pushes(engine: WholeEngine) -> PushCounts:
    return engine.scheduler.stats().connector.pushes


def landings(engine: WholeEngine) -> LandingCounts:
    return engine.scheduler.stats().connector.landings


def slots_of(engine: WholeEngine) -> npt.NDArray[np.uint64]:
    """A decode engine's staging memory, one row for each slot."""
    landing = engine.worker._landing
    assert landing is not None
    slots: npt.NDArray[np.uint64] = landing.slots.view(np.uint64)
    return slots


def num_read(engine: WholeEngine) -> int:
    """How many blocks a decode engine has read from peers."""
    return sum(stats.num_blocks for stats in engine.scheduler.stats().connector.transfers)


def is_idle(*engines: WholeEngine) -> bool:
    """Whether every block is free again, every slot too, and nothing is left to do."""
    for engine in engines:
        engine.connector._parts.landings.check()
        now = landings(engine)
        if engine.num_free != NUM_BLOCKS - 1 or now.num_free_slots != now.num_slots:
            return False
    return not any(engine.scheduler.has_requests() for engine in engines)


def run_idle(*engines: WholeEngine, limit_s: float = LIMIT_S) -> None:
    """Run until both pools and all slots are as they were."""
    run_until(lambda: is_idle(*engines), *engines, limit_s=limit_s)
