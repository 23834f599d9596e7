"""KV moved by real NIXL agents between real processes."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from nixl_engines import WORDS_PER_BLOCK, Engine, a_request, until
from nixl_processes import PrefillProcess, prefill_process

from pdcore.connector.base import KVCaches, KVLoad
from pdcore.connector.nixl import NixlConfig, NixlConnector, mover
from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.notices import NoticeKind, NoticeSender
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import ConfigError
from pdcore.messages import TransferKey
from pdcore.request import Request

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

PROMPT = list(range(30))
BLOCKS = [5, 6, 7, 12, 11, 10, 9, 33]


@pytest.fixture(scope="module")
def prefill() -> Iterator[PrefillProcess]:
    """A prefill engine for the tests that do it no harm. Unasked, it hardly ever looks."""
    with prefill_process(idle_poll_s=10.0) as process:
        yield process


@contextmanager
def decode(**config: object) -> Iterator[Engine]:
    """A decode engine; afterwards none of its threads may be left."""
    before = set(threading.enumerate())
    with closing(Engine(**config)) as engine:  # type: ignore[arg-type]
        yield engine
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if name.startswith("pdcore-nixl")] == []


def content(block_ids: list[int]) -> list[list[int]]:
    """What the prefill engine's buffer holds in some blocks: first and last word of each."""
    return [[i * WORDS_PER_BLOCK, (i + 1) * WORDS_PER_BLOCK - 1] for i in block_ids]


def held(engine: Engine, block_ids: list[int]) -> list[list[int]]:
    """The same of a decode engine's buffer."""
    blocks: list[list[int]] = engine.buffer[block_ids][:, [0, -1]].tolist()
    return blocks


def test_blocks_arrive_by_position(prefill: PrefillProcess) -> None:
    """Scattered and adjacent blocks land where the prompt needs them, and nowhere else."""
    ticket = prefill.prefill(PROMPT, BLOCKS)
    with decode() as engine:
        request = a_request(PROMPT, ticket)
        uid = engine.add(request)
        local = [1, 2, 3, 9, 8, 7, 6, 20]
        engine.load(request, uid, local)
        engine.step_until(lambda: engine.received or engine.failed)
        assert engine.failed == []
        assert held(engine, local) == content(BLOCKS)
        others = np.delete(engine.buffer, local, axis=0)
        assert not others.any()
        until(lambda: ticket["transfer_id"] in prefill.sent)
        (stats,) = engine.scheduler.stats().transfers
        assert (stats.num_blocks, stats.num_descriptors) == (8, 3)
        assert stats.num_bytes == 8 * 8 * WORDS_PER_BLOCK
        assert stats.queue_s >= 0
        assert stats.wire_s > 0
        assert stats.accept_s is not None
        engine.finish(request, uid, [])
        assert not engine.scheduler.has_pending()


def test_only_missing_blocks_are_read(prefill: PrefillProcess) -> None:
    """With three blocks of the prefix here, the others are read and those three left alone."""
    ticket = prefill.prefill(PROMPT, BLOCKS)
    with decode() as engine:
        request = a_request(PROMPT, ticket)
        load = engine.load(request, engine.add(request), [4, 5, 6, 7, 8], num_local=12)
        assert load.num_external_tokens == 17
        engine.step_until(lambda: engine.received or engine.failed)
        assert held(engine, [4, 5, 6, 7, 8]) == content(BLOCKS[3:])
        assert not engine.buffer[:4].any()


def load_some(engine: Engine, prefill: PrefillProcess) -> KVLoad:
    """Load a prompt, to its end."""
    request = a_request(PROMPT, prefill.prefill(PROMPT, BLOCKS))
    num_ended = len(engine.received) + len(engine.failed)
    load = engine.load(request, engine.add(request), list(range(1, 9)))
    engine.step_until(lambda: len(engine.received) + len(engine.failed) > num_ended)
    return load


@contextmanager
def calls_for_help(*, num_lost: int = 0) -> Iterator[list[TransferKey]]:
    """The loads for which a reader calls its peer; the first calls are lost on the way."""
    calls: list[TransferKey] = []
    send = NoticeSender.send

    def listen(sender: NoticeSender, kind: NoticeKind, *transfer: TransferKey) -> None:
        if kind is NoticeKind.NEEDS_PEER:
            calls.extend(transfer)
            if len(calls) <= num_lost:
                return
        send(sender, kind, *transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoticeSender, "send", listen)
        yield calls


def test_a_read_that_is_done_at_once_calls_nobody(
    prefill: PrefillProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several reads those alone call the peer whose post left something to wait for: within a
    host, the one that makes the connection."""
    post, are_done = TransferAgent.post_read, []

    def note(agent: TransferAgent, *ids: Any) -> tuple[Any, bool]:
        handle, is_done = post(agent, *ids)
        are_done.append(is_done)
        return handle, is_done

    monkeypatch.setattr(TransferAgent, "post_read", note)
    with decode() as engine, calls_for_help() as calls:
        loads = [load_some(engine, prefill).transfer for _ in range(4)]
        assert engine.received == loads
        awaited = [load for load, is_done in zip(loads, are_done, strict=True) if not is_done]
        assert list(dict.fromkeys(calls)) == awaited


def test_a_peer_is_called_for_reads_that_need_it(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a network every read calls, also those right after another one: so a peer that rests
    for an hour looks at once."""
    monkeypatch.setattr(mover, "_CALL_EVERY_S", 3600.0)
    with (
        prefill_process(network, idle_poll_s=3600.0) as prefill,
        calls_for_help() as calls,
        decode() as engine,
    ):
        for number in range(3):
            load = load_some(engine, prefill)
            assert engine.received[-1] == load.transfer
            assert len(calls) == len({load.transfer, *calls}) == number + 1


def test_a_call_that_gets_lost_is_made_again(network: dict[str, str]) -> None:
    """A peer that rests for an hour hears of the read all the same."""
    with (
        prefill_process(network, idle_poll_s=3600.0) as prefill,
        calls_for_help(num_lost=1) as calls,
        decode() as engine,
    ):
        load = load_some(engine, prefill)
        assert engine.received == [load.transfer]
        assert len(calls) > 1


def test_many_loads_at_once(prefill: PrefillProcess) -> None:
    """Twelve loads in flight together all arrive, each in its own blocks."""
    prompts = [[n, *range(1, 8)] for n in range(12)]
    tickets = [
        prefill.prefill(prompt, [2 * n + 20, 2 * n + 21]) for n, prompt in enumerate(prompts)
    ]
    with decode() as engine:
        for n, (prompt, ticket) in enumerate(zip(prompts, tickets, strict=True)):
            request = a_request(prompt, ticket, request_id=str(n))
            engine.load(request, engine.add(request), [2 * n + 1, 2 * n + 2])
        engine.step_until(lambda: len(engine.received) + len(engine.failed) == 12)
        assert engine.failed == []
        local = [i for n in range(12) for i in (2 * n + 1, 2 * n + 2)]
        assert held(engine, local) == content(list(range(20, 44)))


def test_foreign_block_ids_fail_only_their_load(prefill: PrefillProcess) -> None:
    """A ticket that names a block beyond the peer's memory is not read, and poisons nothing."""
    wrong = prefill.prefill(PROMPT, [1, 2, 3, 4, 5, 6, 7, 9999])
    right = prefill.prefill(PROMPT, BLOCKS)
    with decode() as engine:
        for name, ticket in (("wrong", wrong), ("right", right)):
            request = a_request(PROMPT, ticket, request_id=name)
            engine.load(request, engine.add(request), list(range(1, 9)))
        engine.step_until(lambda: engine.received and engine.failed)
        assert "block 9999 is named, but the peer has 64" in engine.failed[0].cause
        assert held(engine, list(range(1, 9))) == content(BLOCKS)


@pytest.mark.parametrize("field", ["block_ids", "generations", "num_tokens", "prompt_digest"])
def test_what_was_changed_on_the_way_is_not_vouched_for(
    prefill: PrefillProcess, field: str
) -> None:
    """Unsigned parameters that name anything else fail their load; the ticket lives on."""
    ticket = prefill.prefill(PROMPT, BLOCKS)
    prompt = [token + 1 for token in PROMPT] if field == "prompt_digest" else PROMPT
    forged = {
        "block_ids": [21, *BLOCKS[1:]],
        "generations": [99, *ticket["generations"][1:]],
        "num_tokens": ticket["num_tokens"] - 1,
        "prompt_digest": prompt_digest(a_request(prompt)),
    }
    assert forged[field] != ticket[field]
    with decode() as engine:
        request = a_request(prompt, ticket | {field: forged[field]})
        engine.load(request, engine.add(request), [1, 2, 3, 4, 5, 6, 7, 8])
        (failure,) = engine.step_until(lambda: engine.failed)
        assert "what its reader was told is not what the ticket stands for" in failure.cause
        assert engine.received == []
    with decode() as engine:
        _read(engine, ticket)


def test_one_ticket_vouches_for_one_read(prefill: PrefillProcess) -> None:
    """Two requests come with one ticket and both read: the second yes would be for blocks that the
    first one let go."""
    ticket = prefill.prefill(PROMPT, BLOCKS)
    with decode() as engine:
        for name, local in (
            ("a", [1, 2, 3, 4, 5, 6, 7, 8]),
            ("b", [11, 12, 13, 14, 15, 16, 17, 18]),
        ):
            request = a_request(PROMPT, ticket, name)
            engine.load(request, engine.add(request), local)
        engine.step_until(lambda: engine.received and engine.failed)
        (failure,) = engine.failed
        assert len(engine.received) == 1
        assert "it was accepted before" in failure.cause


def test_an_idle_lease_costs_nothing(prefill: PrefillProcess) -> None:
    """Holding a lease and renewing it takes both engines under 2 % of a core."""
    ticket = prefill.prefill(PROMPT, BLOCKS)
    with decode() as engine:
        request = a_request(PROMPT, ticket)
        engine.add(request)
        engine.step()
        prefill.begin("rest", 2.0)
        used_here_s = engine.rest(2.0)
        used_there_s = prefill.end()
        assert used_here_s < 0.04
        assert used_there_s < 0.04


def test_a_read_after_a_rest_is_quick(prefill: PrefillProcess) -> None:
    """A first read takes long only if nobody wakes the idle peer; the doorbell does."""
    with decode() as engine:
        ticket = prefill.prefill(PROMPT, BLOCKS)
        engine.rest(0.2)
        request = a_request(PROMPT, ticket)
        uid = engine.add(request)
        engine.load(request, uid, list(range(1, 9)))
        engine.step_until(lambda: engine.received or engine.failed)
        (stats,) = engine.scheduler.stats().transfers
        assert stats.wire_s < 1.0


def test_a_killed_peer_and_its_successor() -> None:
    """A peer killed before the read fails the load at once; one restarted there serves anew."""
    with decode(request_timeout_s=2.0) as engine:
        with prefill_process(engine_id="p") as first:
            warm, ticket, late = (first.prefill(PROMPT, BLOCKS) for _ in range(3))
            _read(engine, warm)
            request = a_request(PROMPT, ticket)
            engine.load(request, engine.add(request), list(range(1, 9)))
            waiting = a_request(PROMPT, late)
            waiting_uid = engine.add(waiting)
            first.kill()
            engine.step_until(lambda: engine.received or engine.failed, limit_s=5)
            assert engine.received == []
            assert "engine p at 127.0.0.1" in engine.failed[0].cause
        with prefill_process(engine_id="p", port=ticket["port"]) as second:
            engine.clear()
            engine.load(waiting, waiting_uid, list(range(1, 9)), attempt=1)
            engine.step_until(lambda: engine.failed, limit_s=15)
            engine.clear()
            _read(engine, second.prefill(PROMPT, BLOCKS))


def _read(engine: Engine, ticket: dict[str, object]) -> None:
    """Load a ticket and check its data."""
    request = a_request(PROMPT, ticket)
    uid = engine.add(request)
    engine.load(request, uid, list(range(1, 9)))
    engine.step_until(lambda: engine.received or engine.failed)
    assert engine.failed == []
    assert held(engine, list(range(1, 9))) == content(BLOCKS)
    engine.finish(request, uid, [])
    engine.clear()


def test_a_hung_peer(network: dict[str, str]) -> None:
    """A stopped peer fails its load at the stall limit, and nothing lands later."""
    # Long enough for a good read, its agent included, on a machine that is busy.
    with prefill_process(network) as hung, decode(stall_timeout_s=3.0) as engine:
        _read(engine, hung.prefill(PROMPT, BLOCKS))
        request = a_request(PROMPT, hung.prefill(PROMPT, BLOCKS))
        uid = engine.add(request)
        began = _read_from_stopped(engine, hung, request, uid)
        engine.step_until(lambda: engine.failed)
        assert 3.0 < time.monotonic() - began < 10.0
        assert "(limit 3 s)" in engine.failed[0].cause
        _nothing_lands_later(engine, hung)


def test_cut_off_stops_a_cancelled_read(network: dict[str, str], prefill: PrefillProcess) -> None:
    """A read from a hung peer delays no other peer's; once cut off, it ends and never lands."""
    with prefill_process(network) as hung, decode(stall_timeout_s=60) as engine:
        _read(engine, hung.prefill(PROMPT, BLOCKS))
        request = a_request(PROMPT, hung.prefill(PROMPT, BLOCKS))
        uid = engine.add(request)
        _read_from_stopped(engine, hung, request, uid)
        other = a_request(PROMPT, prefill.prefill(PROMPT, BLOCKS))
        load = engine.load(other, engine.add(other), list(range(11, 19)))
        engine.step_until(lambda: engine.received)
        assert engine.received == [load.transfer]
        engine.clear()
        transfer = TransferKey(uid, 0)
        engine.scheduler.cancel(transfer)
        engine.finish(request, uid, [])
        engine.rest(0.1)
        assert (engine.received, engine.failed) == ([], [])
        engine.scheduler.cut_off(transfer)
        engine.step_until(lambda: engine.failed, limit_s=5)
        assert "did not finish a cancelled load in time" in engine.failed[0].cause
        _nothing_lands_later(engine, hung)


def _read_from_stopped(engine: Engine, peer: PrefillProcess, request: Request, uid: int) -> float:
    """Stop a peer and post a read that it cannot answer; return when it was stopped."""
    engine.step()
    peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    engine.load(request, uid, list(range(1, 9)))
    engine.step_until(lambda: "being read" in (engine.scheduler.explain(request) or ""))
    engine.rest(0.2)
    return began


def _nothing_lands_later(engine: Engine, hung: PrefillProcess) -> None:
    """Once a load is reported, the peer's coming back writes nothing to its blocks."""
    engine.clear()
    hung.signal(signal.SIGCONT)
    engine.rest(0.5)
    assert not engine.buffer.any()


def test_a_peer_killed_while_it_is_read(network: dict[str, str]) -> None:
    """A peer that dies with a read in flight fails it within a second."""
    with prefill_process(network) as doomed, decode(stall_timeout_s=60) as engine:
        _read(engine, doomed.prefill(PROMPT, BLOCKS))
        request = a_request(PROMPT, doomed.prefill(PROMPT, BLOCKS))
        uid = engine.add(request)
        _read_from_stopped(engine, doomed, request, uid)
        assert engine.failed == []
        began = time.monotonic()
        doomed.kill()
        engine.step_until(lambda: engine.failed, limit_s=5)
        assert time.monotonic() - began < 1.0
        assert "lost engine" in engine.failed[0].cause


def test_memory_must_be_contiguous() -> None:
    """A buffer whose blocks are not where its shape says is refused in words."""
    worker = NixlConnector(NixlConfig(block_size=4)).worker_side()
    buffer = np.zeros((8, 64), dtype=np.uint64)
    with pytest.raises(ConfigError, match="not contiguous"):
        worker.register_kv_caches(
            KVCaches(buffer=buffer[:, ::2], bytes_per_block=256, fingerprint="")
        )
    with pytest.raises(ConfigError, match="blocks of 256 bytes need 2048"):
        worker.register_kv_caches(KVCaches(buffer=buffer, bytes_per_block=256, fingerprint=""))
    worker.close()
    worker.close()
