"""A peer that hangs at any stage of a transfer, for less time than others wait for it or for more.

The runners check every slot that they read, so wrong KV is an error, and tokens must be those of a
solo run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import attrs
import pytest
from nixl_whole_engine import BLOCK_SIZE, NUM_BLOCKS, WholeEngine, run_until
from nixl_whole_process import WholeProcess, whole_process

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.request import Request, SamplingParams

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_errors"),
]

_RNG = random.Random(4)
PROMPT, OTHER, AFTER, *FILLERS = ([_RNG.randrange(10, 1000) for _ in range(36)] for _ in range(12))
NUM_TOKENS = 6
LIMITS = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
STAGING = {"push_staging_bytes": 32 * 8 * BLOCK_SIZE}
PATIENT = {"lease_s": 600.0, "request_timeout_s": 600.0, "stall_timeout_s": 600.0}
IMPATIENT = {"lease_s": 1.5, "request_timeout_s": 1.0, "stall_timeout_s": 2.0}
"""Yet enough, on a busy machine, for what must be done before the peer hangs."""
HANG_S = 3.5
"""Longer than each of the impatient ones' limits."""


@attrs.define(eq=False)
class Scene:
    """A process that is to hang, one engine that deals with it, and one that has nothing to do with
    it but deals with the same engine.

    Args:
        stage: where the peer hangs.
        is_patient: whether all wait for longer than it hangs.
        here_reads: whether this side is the one that decodes.
        owes_answer: whether the peer has not answered the command yet that made it hang.
    """

    peer: WholeProcess
    here: WholeEngine
    other: WholeEngine
    stage: str
    is_patient: bool
    here_reads: bool
    owes_answer: bool = False

    def run(self, condition: Any) -> None:
        run_until(condition, self.here, self.other)

    def until_stopped(self) -> None:
        self.run(lambda: self.peer.has_stopped)

    def hang(self, *, before_it_goes_on: Callable[[], None] = lambda: None) -> None:
        """Let all limits of the impatient pass, then let the peer go on."""
        if not self.is_patient:
            end = self.here.clock.now() + HANG_S
            self.run(lambda: self.here.clock.now() > end)
        before_it_goes_on()
        assert self.peer.has_stopped
        self.peer.go_on()
        if self.owes_answer:
            self.peer.end()

    def here_decodes(self, name: str, prompt: list[int], params: dict[str, Any]) -> int:
        """Decode here; returns how many tokens of KV were loaded."""
        self.here.add(name, prompt, max_tokens=NUM_TOKENS, params=params)
        return self.here_ends(name, prompt)

    def here_ends(self, name: str, prompt: list[int]) -> int:
        self.run(lambda: name in self.here.ends)
        assert self.here.tokens[name] == self.solo(prompt), self.here.ends[name]
        return self.here.ends[name].num_external_tokens

    def peer_ends(self, name: str, prompt: list[int]) -> int:
        """See a request of the peer end; returns how many tokens of KV were loaded."""
        self.run(lambda: self.peer.ask("end", name))
        tokens, end = self.peer.ask("end", name)
        assert tokens == self.solo(prompt), end
        loaded: int = end.num_external_tokens
        return loaded

    def peer_prefills(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Have the peer compute a prompt and hand it over."""
        self.peer.ask("add", name, prompt, 1, {"do_remote_decode": True})
        return self.peer_hands_over(name)

    def peer_hands_over(self, name: str) -> dict[str, Any]:
        self.run(lambda: self.peer.ask("end", name))
        params: dict[str, Any] = self.peer.ask("end", name)[1].kv_transfer_params
        return params

    def peer_stops_at(self, command: str, *arguments: Any) -> None:
        """Give the peer a command that makes it stop, perhaps before it answers."""
        self.peer.begin(command, *arguments)
        self.owes_answer = True
        self.until_stopped()

    def solo(self, prompt: list[int]) -> list[int]:
        request = Request("r", prompt, sampling=SamplingParams(max_tokens=NUM_TOKENS))
        return self.here.runner.solo_tokens(request)

    def nobody_else_waits(self) -> None:
        """While the peer hangs, the other two have a transfer between them, from its beginning to
        its end: were it held up, it would be for as long as the patient wait."""
        sender, reader = (self.other, self.here) if self.here_reads else (self.here, self.other)
        params = sender.prefill("other", OTHER, reader)
        request = reader.add("other", OTHER, max_tokens=NUM_TOKENS, params=params)
        run_until(lambda: "other" in reader.ends, reader, sender)
        assert reader.tokens["other"] == reader.runner.solo_tokens(request)
        if self.is_patient:
            assert reader.ends["other"].num_external_tokens == len(OTHER) - 1
        assert self.peer.has_stopped

    def all_is_idle(self) -> None:
        """Every block and slot of all three is free again."""

        def is_idle() -> bool:
            landings = self.peer.ask("landings")
            slots = self.here.scheduler.stats().connector.landings
            return (
                self.here.num_free == self.other.num_free == NUM_BLOCKS - 1
                and self.peer.ask("num_free") == NUM_BLOCKS - 1
                and landings.num_free_slots == landings.num_slots
                and slots.num_free_slots == slots.num_slots
            )

        self.run(is_idle)


@pytest.fixture(params=["patient", "impatient"])
def patience(request: pytest.FixtureRequest) -> dict[str, float]:
    return PATIENT if request.param == "patient" else IMPATIENT


@pytest.fixture
def scene(request: pytest.FixtureRequest, patience: dict[str, float]) -> Iterator[Scene]:
    """Made for the parameter: where the peer stops itself, or None, and whether it decodes."""
    stop_at, peer_decodes, environment = request.param
    with ExitStack() as stack:
        config = dict(patience, **STAGING)
        here, other = (
            stack.enter_context(closing(WholeEngine(limits=LIMITS, **config))) for _ in range(2)
        )
        peer = stack.enter_context(
            whole_process(environment, limits=LIMITS, stop_at=stop_at, **config)
        )
        is_patient = patience is PATIENT
        yield Scene(
            peer,
            here,
            other,
            stage=stop_at or "",
            is_patient=is_patient,
            here_reads=not peer_decodes,
        )


def scenes(*stages: str, peer_decodes: bool) -> Any:
    cases = [(stage, peer_decodes, None) for stage in stages]
    return pytest.mark.parametrize("scene", cases, indirect=True, ids=stages)


@scenes(
    "before answers the handshake",
    "before answers a renewal",
    "before accepts",
    "after accepts",
    peer_decodes=False,
)
def test_a_prefill_engine_hangs(scene: Scene) -> None:
    """Its reader has what it read, or computes it; who reads from others notices nothing."""
    params = scene.peer_prefills("a", PROMPT)
    if "renewal" in scene.stage:
        scene.here.scheduler.pause()
    scene.here.add("a", PROMPT, max_tokens=NUM_TOKENS, params=params)
    scene.until_stopped()
    scene.here.scheduler.resume()
    scene.nobody_else_waits()
    if not scene.is_patient:
        scene.here_ends("a", PROMPT)
    scene.hang()
    num_loaded = scene.here_ends("a", PROMPT)
    assert num_loaded == len(PROMPT) - 1 or not scene.is_patient
    scene.here_decodes("after", AFTER, scene.peer_prefills("after", AFTER))
    scene.all_is_idle()


@pytest.mark.parametrize("scene", [(None, False, {"UCX_TLS": "tcp"})], indirect=True, ids=["tcp"])
def test_a_prefill_engine_hangs_while_it_is_read(
    network: dict[str, str], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a network, where nothing moves without it."""
    params = scene.peer_prefills("a", PROMPT)
    post_read = TransferAgent.post_read

    def stop_and_post(agent: TransferAgent, *ids: Any) -> Any:
        if not stopped:
            stopped.append(True)
            scene.peer.stop()
        return post_read(agent, *ids)

    stopped: list[bool] = []
    monkeypatch.setattr(TransferAgent, "post_read", stop_and_post)
    scene.here.add("a", PROMPT, max_tokens=NUM_TOKENS, params=params)
    scene.until_stopped()
    scene.nobody_else_waits()
    if not scene.is_patient:
        scene.here_ends("a", PROMPT)
    scene.hang()
    num_loaded = scene.here_ends("a", PROMPT)
    assert num_loaded == len(PROMPT) - 1 or not scene.is_patient


@scenes(
    "before asks for the handshake",
    "before renews",
    "before reads",
    "after reads",
    "before asks to accept",
    "after asks to accept",
    peer_decodes=True,
)
def test_a_decode_engine_hangs(scene: Scene) -> None:
    """Its lease ends meanwhile and its blocks get others' KV; it never takes that for its own."""
    params = scene.here.prefill("a", PROMPT)
    if "renews" in scene.stage:
        scene.peer.ask("pause")
    scene.peer_stops_at("add", "a", PROMPT, NUM_TOKENS, params)
    scene.nobody_else_waits()
    if not scene.is_patient:
        scene.run(lambda: scene.here.num_free == NUM_BLOCKS - 1)
    for i, prompt in enumerate(FILLERS):
        scene.here.add(f"filler{i}", prompt, max_tokens=1)
        scene.run(lambda i=i: f"filler{i}" in scene.here.ends)
    scene.hang()
    if "renews" in scene.stage:
        scene.peer.ask("resume")
    num_loaded = scene.peer_ends("a", PROMPT)
    assert num_loaded == len(PROMPT) - 1 or not scene.is_patient
    scene.peer.ask("add", "after", AFTER, NUM_TOKENS, scene.here.prefill("after", AFTER))
    scene.peer_ends("after", AFTER)
    scene.all_is_idle()


def may_be_written(scene: Scene, push_to: dict[str, Any]) -> None:
    """The slots that a hanging peer may write to are given to nobody."""
    again = scene.here.connector.expect_push(Request("any", OTHER))
    assert again is not None
    if scene.stage not in ("before claims", "after tells the end"):
        assert set(again["slots"]).isdisjoint(push_to["slots"])
    scene.here.connector.call_off_push(again)


@scenes(
    "before claims",
    "after claims",
    "before writes",
    "after writes",
    "before tells the end",
    "after tells the end",
    peer_decodes=False,
)
def test_a_prefill_engine_that_pushes_hangs(scene: Scene) -> None:
    """Its slots are nobody else's until it has said that it stopped; what it sent is used, or read
    or computed."""
    push_to = scene.here.connector.expect_push(Request("any", PROMPT))
    order = ("add", "a", PROMPT, 1, {"do_remote_decode": True, "push_to": push_to})
    if "claims" in scene.stage:
        scene.peer_stops_at(*order)
    else:
        scene.peer.ask("pause")
        scene.peer.ask(*order)
        scene.run(lambda: scene.peer.ask("num_pushes"))
        scene.peer_stops_at("resume")
    scene.nobody_else_waits()
    scene.hang(before_it_goes_on=partial(may_be_written, scene, push_to))
    num_loaded = scene.here_decodes("a", PROMPT, scene.peer_hands_over("a"))
    assert num_loaded == len(PROMPT) - 1 or not scene.is_patient
    scene.all_is_idle()


@scenes(
    "before answers a claim",
    "after answers a claim",
    "before hears of the end",
    "after hears of the end",
    "before copies",
    "after copies",
    peer_decodes=True,
)
def test_a_decode_engine_that_is_pushed_to_hangs(scene: Scene) -> None:
    """Who pushes to it ends its prompt all the same, and tells it so once it goes on."""
    push_to = scene.peer.ask("expect_push", PROMPT)
    scene.here.scheduler.pause()
    scene.here.add("a", PROMPT, max_tokens=1, params={"do_remote_decode": True, "push_to": push_to})
    pushes = scene.here.scheduler.stats
    scene.run(lambda: scene.peer.has_stopped or pushes().connector.pushes.num_started)
    scene.here.scheduler.resume()
    scene.run(lambda: "a" in scene.here.ends)
    order = ("add", "a", PROMPT, NUM_TOKENS, scene.here.ends["a"].kv_transfer_params)
    if "copies" in scene.stage:
        scene.peer_stops_at(*order)
    else:
        scene.until_stopped()
    scene.nobody_else_waits()
    scene.hang()
    if "copies" not in scene.stage:
        scene.peer.ask(*order)
    num_loaded = scene.peer_ends("a", PROMPT)
    assert num_loaded == len(PROMPT) - 1 or not scene.is_patient
    scene.all_is_idle()
