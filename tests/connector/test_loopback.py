"""`LoopbackConnector`: two engines of one process, a good wire, and every bad one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore import KVCacheManager, Limits, LRUBlockPool, UnifiedScheduler
from pdcore.connector import KVCaches, KVLoad
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.loopback.meta import LoopbackMeta
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import ConfigError, InvalidTransferParams
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import SchedulerOutput, TransferKey
from pdcore.request import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.testing import Driver, FakeKVRunner, VirtualClock

BLOCK_SIZE = 4
LEASE_S = 30.0
PROMPT = tuple(range(5, 24))
MAX_TOKENS = 4


class Engine:
    """A scheduler, a runner and a loopback connector, stepped by hand."""

    def __init__(
        self,
        fabric: LoopbackFabric,
        name: str,
        *,
        num_blocks: int = 40,
        model_name: str = "fake",
        block_size: int = BLOCK_SIZE,
        **limits: Any,
    ) -> None:
        connector = LoopbackConnector(
            fabric, engine_id=name, block_size=block_size, lease_s=LEASE_S
        )
        self.connector = connector.scheduler_side()
        self.runner = FakeKVRunner(
            block_size=block_size, connector=connector.worker_side(), model_name=model_name
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.pool = LRUBlockPool(num_blocks, block_size)
        clock = fabric.clock
        assert isinstance(clock, VirtualClock)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool),
            limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, **limits),
            connector=self.connector,
            clock=clock,
        )
        self.driver = Driver(self.scheduler, self.runner, clock=clock)

    def prefill(self, prompt: Sequence[int] = PROMPT, name: str = "r") -> dict[str, Any]:
        """Compute a prompt and return what its hand-over says."""
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=1),
            kv_transfer_params={"do_remote_decode": True},
        )
        self.driver.add(request)
        end = None
        while end is None:
            self.driver.step()
            end = self.driver.delivered[name].end
        assert end.kv_transfer_params is not None
        return end.kv_transfer_params

    def add(
        self, params: Mapping[str, Any], prompt: Sequence[int] = PROMPT, name: str = "r"
    ) -> Request:
        """Add a request whose KV lies elsewhere."""
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            kv_transfer_params=params,
        )
        self.driver.add(request)
        return request

    def decode(self, params: Mapping[str, Any], prompt: Sequence[int] = PROMPT) -> list[int]:
        """Serve such a request to its end."""
        self.add(params, prompt)
        return self.driver.run()["r"].token_ids

    def step(self, n: int = 1) -> None:
        """Run some steps."""
        for _ in range(n):
            self.driver.step()

    @property
    def num_external_tokens(self) -> int:
        return self.scheduler.stats().num_external_tokens

    @property
    def num_held(self) -> int:
        return len(self.pool.holds())


Pair = tuple[Engine, Engine, LoopbackFabric]


def make_pair(
    faults: LoopbackFaults | Callable[[KVLoad], LoopbackFaults] | None = None, **limits: Any
) -> Pair:
    """A prefill engine and a decode engine on one virtual clock."""
    fabric = LoopbackFabric(clock=VirtualClock(), faults=faults)
    return Engine(fabric, "p"), Engine(fabric, "d", **limits), fabric


def solo(engine: Engine, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What a prompt gives alone."""
    return engine.runner.solo_tokens(
        Request("r", prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS))
    )


# A good wire.


def test_a_handed_over_prompt_is_not_computed_again():
    """All but the last prompt token come from the peer, and the peer's blocks are let go."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    assert prefill.num_held == 1
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1
    prefill.step()
    assert prefill.num_held == 0
    assert not prefill.scheduler.has_requests()


def test_only_what_is_missing_is_loaded():
    """Blocks that the decode engine has are not asked for; the rest goes by position."""
    prefill, decode, _ = make_pair()
    first, second = PROMPT[:9], PROMPT
    decode.decode(prefill.prefill(first), first)
    before = decode.num_external_tokens
    assert decode.decode(prefill.prefill(second), second) == solo(decode)
    assert decode.num_external_tokens - before == len(second) - 1 - 8


def test_a_prompt_that_is_all_here_costs_one_notice():
    """Nothing is loaded, and the peer hears at once that its blocks may go."""
    prefill, decode, _ = make_pair()
    short = PROMPT[:9]
    decode.decode(prefill.prefill(short), short)
    before = decode.num_external_tokens
    params = prefill.prefill(short, name="again")
    decode.add(params, short)
    decode.step()
    prefill.step()
    assert decode.num_external_tokens == before
    assert prefill.num_held == 0


def test_the_blocks_are_copied_bit_by_bit():
    """The decode engine's blocks hold what the prefill engine computed."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    decode.add(params)
    decode.step(2)
    source = prefill.runner.kv_caches.buffer[list(params["block_ids"])]
    target = decode.runner.kv_caches.buffer
    assert all(block.tolist() in target.tolist() for block in source[:4])


class Halves:
    """Both halves of a decode engine's connector, called by hand; engine p is its peer."""

    def __init__(
        self, buffers: Sequence[Any] | None = None, *, faults: LoopbackFaults | None = None
    ) -> None:
        fabric = LoopbackFabric(clock=VirtualClock(), faults=faults)
        for name, buffer in zip("pd", buffers or np.zeros((2, 6, 2)), strict=True):
            connector = LoopbackConnector(fabric, engine_id=name, block_size=2)
            self.scheduler = connector.scheduler_side()
            self.worker = connector.worker_side()
            caches = KVCaches(buffer=buffer, bytes_per_block=16, fingerprint="f")
            self.worker.register_kv_caches(caches)
            if name == "p":
                self.registry = self.scheduler._engine.registry

    def allocate(self, uid: int, block_ids: Sequence[int] = (1, 5)) -> tuple[Request, KVLoad]:
        """Add a request of five tokens, four of them at the peer, and plan its load."""
        ticket = LoopbackTicket(
            engine_id="p",
            engine_epoch=0,
            transfer_id=f"t{uid}",
            block_ids=(4, 2),
            generations=(1, 1),
            num_tokens=5 - 1,
            block_size=2,
            prompt_digest=prompt_digest(Request("r", [1, 2, 3, 4, 5])),
            lease_s=9.0,
        )
        self.registry.grant(f"t{uid}", ticket.contents, lease_s=9.0)
        request = Request(f"r{uid}", [1, 2, 3, 4, 5], kv_transfer_params=ticket.to_params())
        self.scheduler.request_added(request, uid)
        load = KVLoad(
            transfer=TransferKey(uid, 1),
            request=request,
            num_local_tokens=0,
            num_external_tokens=4,
            block_ids=np.array(block_ids, dtype=np.int32),
            deadline=9.0,
        )
        self.scheduler.update_state_after_alloc(request, load)
        return request, load

    def build(self) -> LoopbackMeta | None:
        """What the worker hears with a plan without tokens."""
        nothing = np.zeros(0, dtype=np.int32)
        plan = SchedulerOutput(
            step_id=0,
            rows=nothing,
            epochs=nothing,
            num_scheduled_tokens=nothing,
            num_computed_tokens=nothing,
            samples=nothing.astype(np.bool_),
            block_rows=nothing,
            block_positions=nothing,
            block_ids=nothing,
            finished_rows=nothing,
        )
        return self.scheduler.build_connector_meta(plan)


def test_torch_tensors_are_copied_as_well():
    """A KV memory may be a tensor."""
    torch = pytest.importorskip("torch")
    source, target = torch.arange(24.0).reshape(6, 2, 2), torch.zeros(6, 2, 2)
    halves = Halves([source, target])
    halves.allocate(1)
    halves.worker.start_load_kv(halves.build())
    assert halves.worker.get_finished().finished_recving == (TransferKey(1, 1),)
    assert torch.equal(target[[1, 5]], source[[4, 2]])


def test_reordered_reports_come_newest_first():
    """Loads that end with the same poll are reported the other way round."""
    halves = Halves(faults=LoopbackFaults(delay_polls=1, reorder=True))
    for uid in (1, 2, 3):
        halves.allocate(uid)
    halves.worker.start_load_kv(halves.build())
    assert not halves.worker.get_finished()
    assert [key.uid for key in halves.worker.get_finished().finished_recving] == [3, 2, 1]


def test_the_last_prompt_token_is_never_brought():
    """A peer may have the whole prompt; one token is left to compute. Asking changes nothing."""
    halves = Halves()
    request, _ = halves.allocate(1)
    assert request.kv_transfer_params is not None
    params = request.kv_transfer_params | {
        "prompt_digest": prompt_digest(Request("s", [1, 2, 3, 4]))
    }
    short = Request("s", [1, 2, 3, 4], kv_transfer_params=params)
    halves.scheduler.request_added(short, 2)
    for _ in range(2):
        assert halves.scheduler.get_num_new_matched_tokens(short, 0).num_tokens == 3
        assert halves.scheduler.get_num_new_matched_tokens(short, 2).num_tokens == 1
        assert halves.scheduler.get_num_new_matched_tokens(short, 4).num_tokens == 0


@pytest.mark.parametrize("was_built", [False, True])
def test_an_undone_load_is_never_ordered(was_built: bool):
    """Before the metadata was made or after, an undone load is forgotten; others are not."""
    halves = Halves()
    request, undone = halves.allocate(1)
    halves.allocate(2)
    meta = halves.build() if was_built else None
    halves.scheduler.undo_alloc(request, undone)
    if meta is not None:
        halves.scheduler.rebuild_connector_meta(meta)
    again = halves.build()
    assert again is not None
    assert [order.load.transfer.uid for order in again.loads] == [2]


def test_a_load_that_never_left_is_cancelled_at_once():
    """It is reported as failed without the worker's help."""
    halves = Halves()
    _, load = halves.allocate(1)
    halves.scheduler.cancel(load.transfer)
    assert [failure.transfer for failure in halves.scheduler.take_events().failed] == [
        load.transfer
    ]
    assert halves.build() is None


def test_a_prefill_without_a_hand_over_keeps_nothing():
    """A request that asked for nothing, or was aborted, leaves no hold."""
    prefill, _, _ = make_pair()
    prefill.driver.add(Request("plain", PROMPT, sampling=SamplingParams(max_tokens=1)))
    params = {"do_remote_decode": True}
    prefill.driver.add(Request("gone", PROMPT, kv_transfer_params=params))
    prefill.step()
    prefill.driver.abort(["gone"])
    ends = prefill.driver.run()
    assert [end.end.kv_transfer_params for end in ends.values() if end.end] == [None, None]
    assert prefill.num_held == 0


# Leases.


def test_an_unread_hand_over_ends_with_its_lease():
    """A peer that never comes costs the lease and no more; the engine knows when to look."""
    prefill, _, fabric = make_pair()
    prefill.prefill()
    assert prefill.scheduler.next_wakeup() == LEASE_S
    fabric.clock.advance(LEASE_S)  # type: ignore[attr-defined]
    prefill.step()
    assert prefill.num_held == 0


def test_a_waiting_decode_engine_renews_the_lease():
    """A load that takes longer than the lease is accepted all the same."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_s=50.0))
    params = prefill.prefill()
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1


def test_data_from_a_lapsed_lease_is_not_used():
    """A ticket that ran out before anybody read is refused, and the prompt is computed."""
    prefill, decode, fabric = make_pair()
    params = prefill.prefill()
    fabric.clock.advance(LEASE_S)  # type: ignore[attr-defined]
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == 0


def test_a_hand_over_is_read_once():
    """Who comes second gets nothing, and computes."""
    prefill, decode, fabric = make_pair()
    other = Engine(fabric, "d2")
    params = prefill.prefill()
    assert decode.decode(params) == solo(decode)
    assert other.decode(params) == solo(decode)
    assert other.num_external_tokens == 0


# Bad wires.


def test_a_parked_request_does_not_stop_the_others():
    """While one request waits for its KV, another decodes."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=6))
    decode.add(prefill.prefill())
    decode.driver.add(Request("other", [9, 8, 7], sampling=SamplingParams(max_tokens=5)))
    decode.step(5)
    assert decode.scheduler.status("r") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert decode.driver.delivered["other"].finish_reason is FinishReason.LENGTH
    assert decode.driver.run()["r"].token_ids == solo(decode)


def test_a_delay_in_seconds_is_slept_through():
    """The loop is told when the load is due and needs no polls before it."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_s=7.0))
    decode.add(prefill.prefill())
    decode.step()
    assert decode.scheduler.next_wakeup() == 7.0
    decode.driver.run()
    assert fabric.clock.now() == 7.0


def test_a_lost_completion_ends_with_the_load_timeout():
    """The request is computed here, and nothing stays behind on either side."""
    prefill, decode, fabric = make_pair(LoopbackFaults(lose=True), load_timeout_s=20.0)
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert fabric.clock.now() == 20.0
    assert decode.scheduler.stats().num_failed_loads == 1
    prefill.step()
    assert (prefill.num_held, decode.num_held) == (0, 0)


def test_a_completion_that_comes_twice_counts_once():
    """The repetition is late news and changes nothing."""
    prefill, decode, _ = make_pair(LoopbackFaults(duplicate=True))
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.scheduler.stats().num_late_events == 1


def test_completions_in_another_order_go_to_the_right_requests():
    """Three loads that end newest first give three right answers."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=2, reorder=True))
    prompts = {f"r{i}": [30 + i, *PROMPT] for i in range(3)}
    for name, prompt in prompts.items():
        decode.add(prefill.prefill(prompt, name), prompt, name)
    got = decode.driver.run()
    for name, prompt in prompts.items():
        request = Request(name, prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS))
        assert got[name].token_ids == decode.runner.solo_tokens(request)
    assert decode.num_external_tokens == 3 * len(PROMPT)


@pytest.mark.parametrize("num_valid_tokens", [0, 5, 8, 17])
def test_a_partial_load_keeps_what_is_valid(num_valid_tokens: int):
    """The valid prefix is kept or not, the rest is computed, and the tokens are right."""
    prefill, decode, _ = make_pair(LoopbackFaults(num_valid_tokens=num_valid_tokens))
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1


def test_a_failed_load_may_end_the_request():
    """The application may choose an error, which names the cause."""
    prefill, decode, _ = make_pair(LoopbackFaults(fail="cable pulled"), on_load_failure="fail")
    decode.add(prefill.prefill())
    end = decode.driver.run()["r"].end
    assert end is not None
    assert end.finish_reason is FinishReason.ERROR
    assert "cable pulled" in (end.cause or "")


def test_a_failed_load_may_be_tried_again():
    """The faults of the second attempt are its own."""
    prefill, decode, _ = make_pair(
        lambda load: LoopbackFaults(fail="once" if load.transfer.attempt == 1 else None),
        max_load_retries=1,
    )
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1
    assert decode.num_external_tokens == len(PROMPT) - 1


# Cancelled loads.


def test_a_cancelled_load_gives_its_blocks_back_at_once():
    """Where a load can be called back, one more step ends the quarantine."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=50))
    decode.add(prefill.prefill())
    decode.step()
    decode.driver.abort(["r"])
    decode.step()
    assert decode.pool.counts().quarantined > 0
    decode.step()
    assert decode.pool.counts().quarantined == 0
    assert not decode.scheduler.has_requests()


def test_late_data_lands_in_quarantined_blocks_only():
    """A load that cannot be called back writes after the abort, to blocks nobody has."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=4, late_write=True))
    params = prefill.prefill()
    decode.add(params)
    decode.step()
    decode.driver.abort(["r"])
    decode.step()
    [hold] = decode.pool.holds()
    other = Request("other", [1, 2, 3, 4, 5, 6], sampling=SamplingParams(max_tokens=8))
    decode.driver.add(other)
    sent = prefill.runner.kv_caches.buffer[params["block_ids"][:4]].tolist()
    has_landed_while_held = False
    while decode.num_held:
        decode.step()
        landed = decode.runner.kv_caches.buffer[hold.block_ids[:4]].tolist()
        has_landed_while_held |= landed == sent and bool(decode.num_held)
    assert has_landed_while_held
    assert decode.driver.run()["other"].token_ids == decode.runner.solo_tokens(other)


def test_a_load_that_never_ends_is_cut_off():
    """A quarantine that is older than its limit ends by force."""
    prefill, decode, fabric = make_pair(
        LoopbackFaults(lose=True, late_write=True), quarantine_timeout_s=9.0
    )
    decode.add(prefill.prefill())
    decode.step()
    decode.driver.abort(["r"])
    assert decode.driver.run()["r"].finish_reason is FinishReason.ABORT
    assert fabric.clock.now() == 9.0
    assert decode.num_held == 0


def test_a_load_that_was_planned_and_taken_back_never_starts():
    """An abandoned step takes its load with it; the next one starts another attempt."""
    prefill, decode, _ = make_pair()
    decode.add(prefill.prefill())
    decode.scheduler.abandon(decode.scheduler.schedule())
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1
    assert decode.scheduler.stats().num_failed_loads == 0


# Dead peers.


def test_a_dead_peer_costs_one_computation():
    """Loads in flight fail at once when the peer is gone."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_polls=9))
    decode.add(prefill.prefill())
    decode.step()
    fabric.kill("p")
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert fabric.clock.now() == 0.0


def test_a_peer_that_restarts_keeps_no_promise():
    """Old tickets are refused, and the restarted engine lets its blocks go."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_s=20.0))
    params = prefill.prefill()
    decode.add(params)
    decode.step()
    fabric.restart("p")
    prefill.step()
    assert prefill.num_held == 0
    decode.step()
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1
    assert fabric.clock.now() == 0.0


def test_a_new_engine_under_an_old_name_is_another_one():
    """Tickets of a former life are refused; those of the new one work."""
    prefill, decode, fabric = make_pair()
    old = prefill.prefill()
    new_life = Engine(fabric, "p")
    assert decode.decode(old) == solo(decode)
    assert decode.num_external_tokens == 0
    prompt = [1, *PROMPT]
    assert decode.decode(new_life.prefill(prompt), prompt) == solo(decode, prompt)
    assert decode.num_external_tokens == len(prompt) - 1


def test_another_model_is_refused():
    """Caches with different fingerprints exchange nothing; the cause names both."""
    fabric = LoopbackFabric(clock=VirtualClock())
    prefill = Engine(fabric, "p", model_name="other")
    decode = Engine(fabric, "d", on_load_failure="fail")
    decode.add(prefill.prefill())
    end = decode.driver.run()["r"].end
    assert end is not None
    assert "other-uint64" in (end.cause or "")
    assert "fake-uint64" in (end.cause or "")


# Bad parameters.


def params_with(**changes: Any) -> dict[str, Any]:
    """Good parameters of engine p, with some changed."""
    ticket = LoopbackTicket(
        engine_id="p",
        engine_epoch=0,
        transfer_id="t",
        block_ids=(1, 2),
        generations=(1, 1),
        num_tokens=8,
        block_size=BLOCK_SIZE,
        prompt_digest=prompt_digest(Request("r", PROMPT)),
        lease_s=9.0,
    )
    return ticket.to_params() | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "version"),
        ({"kind": "nixl"}, "kind"),
        ({"engine_id": "nobody"}, "'nobody' never joined"),
        ({"engine_id": 5}, "engine_id"),
        ({"engine_epoch": True}, "engine_epoch"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"block_ids": "12"}, "block_ids"),
        ({"block_ids": [1, -2]}, "block_ids"),
        ({"generations": [1]}, "1 generations"),
        ({"num_tokens": 9}, "for 9 tokens"),
        ({"num_tokens": 0}, "for 0 tokens"),
        ({"block_size": 2, "num_tokens": 4}, "blocks of 2 tokens"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": None}, "lease_s"),
        ({"prompt_digest": None}, "prompt_digest"),
        ({"prompt_digest": "0" * 64}, "another prompt"),
    ],
)
def test_bad_parameters_are_refused_when_the_request_is_added(
    changes: dict[str, Any], message: str
):
    """The error names the field; nothing of the request stays."""
    _, decode, _ = make_pair()
    request = Request("r", PROMPT, kv_transfer_params=params_with(**changes))
    with pytest.raises(InvalidTransferParams, match=message):
        decode.scheduler.add_request(request)
    assert not decode.scheduler.has_requests()


def test_foreign_blocks_are_refused():
    """A ticket that names blocks the peer does not have fails its load alone."""
    prefill, decode, _ = make_pair(on_load_failure="fail")
    params = prefill.prefill() | {"block_ids": [1, 2, 3, 4, 400]}
    decode.add(params)
    end = decode.driver.run()["r"].end
    assert end is not None
    assert "block 400" in (end.cause or "")


@pytest.mark.parametrize("field", ["block_ids", "generations", "num_tokens"])
def test_what_was_changed_on_the_way_is_not_vouched_for(field: str):
    """Whatever the ticket says otherwise, the peer finds out before it says yes."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    other = prefill.prefill([token + 1 for token in PROMPT], name="other")
    forged = {
        "block_ids": other["block_ids"],
        "generations": [g + 1 for g in params["generations"]],
        "num_tokens": params["num_tokens"] - 1,
    }
    assert forged[field] != params[field]
    assert decode.decode(params | {field: forged[field]}) == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=0), "block_size=0"),
        (
            lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=4, lease_s=0),
            "lease_s=0",
        ),
        (
            lambda fabric: LoopbackConnector(fabric, engine_id="x", block_size=4).worker_side(1),
            "rank=1",
        ),
        (lambda _: LoopbackFaults(delay_polls=-1), "delay_polls=-1"),
        (lambda _: LoopbackFaults(delay_s=float("nan")), "delay_s=nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[Any], Any], message: str):
    """The error names the setting."""
    with pytest.raises(ConfigError, match=message):
        make(LoopbackFabric())


def test_a_peer_is_woken_when_its_hand_over_ends():
    """The prefill engine's loop need not poll for the end of its holds."""
    prefill, decode, _ = make_pair()
    woken = threading.Event()
    prefill.connector.start(clock=VirtualClock(), notify=woken.set)
    params = prefill.prefill()
    assert not woken.is_set()
    decode.decode(params)
    assert woken.is_set()


# All of it together.

FAULTS = st.builds(
    LoopbackFaults,
    delay_polls=st.integers(0, 3),
    delay_s=st.sampled_from([0.0, 0.0, 5.0, 45.0]),
    lose=st.sampled_from([False, False, False, True]),
    duplicate=st.booleans(),
    reorder=st.booleans(),
    fail=st.sampled_from([None, None, "pulled"]),
    num_valid_tokens=st.sampled_from([None, None, 0, 6, 13]),
    late_write=st.booleans(),
)
EVENTS = st.lists(st.sampled_from(["prefill", "decode", "abort", "restart", "time"]), max_size=12)


@settings(max_examples=60)
@given(st.lists(FAULTS, min_size=1, max_size=6), EVENTS, st.integers(0, 1), st.data())
def test_no_fault_ever_gives_a_wrong_token(
    faults: list[LoopbackFaults], events: list[str], max_load_retries: int, data: st.DataObject
):
    """Whatever the wire does, each request ends once, with a beginning of its solo tokens, and
    in the end nobody holds a block."""
    chosen = {}

    def choose(load: KVLoad) -> LoopbackFaults:
        return chosen.setdefault(load.transfer, faults[len(chosen) % len(faults)])

    prefill, decode, fabric = make_pair(choose, max_load_retries=max_load_retries)
    for number in range(4):
        prompt = [*PROMPT[: data.draw(st.integers(1, len(PROMPT)))], number % 2]
        decode.add(prefill.prefill(prompt, f"r{number}"), prompt, f"r{number}")
    for event in events:
        match event:
            case "prefill":
                prefill.step()
            case "decode":
                decode.step()
            case "abort":
                decode.driver.abort([f"r{data.draw(st.integers(0, 3))}"])
            case "restart":
                fabric.restart("p")
            case "time":
                fabric.clock.advance(LEASE_S / 2)  # type: ignore[attr-defined]
    for one in decode.driver.run().values():
        expected = decode.runner.solo_tokens(one.request)
        assert one.token_ids == expected[: len(one.token_ids)]
        assert one.finish_reason is FinishReason.ABORT or one.token_ids == expected
    prefill.driver.run()
    assert (prefill.num_held, decode.num_held) == (0, 0)


def test_a_loop_sleeps_while_one_loads_and_another_finds_no_blocks() -> None:
    """With one request parked and one that finds no room, a step without effect leaves no work."""
    fabric = LoopbackFabric(clock=VirtualClock(), faults=LoopbackFaults(delay_s=5.0))
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d", num_blocks=8)
    other = tuple(token + 100 for token in PROMPT)
    decode.add(prefill.prefill(), name="a")
    decode.add(prefill.prefill(other, name="b"), other, name="b")
    decode.step(3)
    assert not decode.scheduler.has_work()
