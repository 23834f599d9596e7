"""Faults of one request, hook or grammar that others must not feel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine

from grammars import AnyToken, CompilesAtOnce, CompilesLater
from pdcore.connector.base import ExternalMatch, FinishedBlocks, HandOver, KVConnector, KVLoad
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.request import FinishReason, Request
from pdcore.scheduler import (
    FCFS,
    Admission,
    AdmissionContext,
    SkipCode,
)

# A29


class RaisesForB(FCFS):
    """Every hook that concerns one request raises for the request b."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def _raise_for(self, request: Request, hook: str) -> None:
        if hook == self._hook and request.request_id == "b":
            raise RuntimeError("boom")

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        self._raise_for(request, "admit")
        return Admission.ADMIT

    def chunk(self, request: Request, num_tokens: int, token_budget: int) -> int:
        self._raise_for(request, "chunk")
        return num_tokens


class BrittleConnector(KVConnector):
    """Brings nothing, and one call of its scheduler's half raises for the request b."""

    def __init__(self, call: str) -> None:
        self._call = call

    def scheduler_side(self) -> _BrittleHalf:
        return _BrittleHalf(self._call)

    def worker_side(self, rank: int = 0) -> NullWorkerConnector:
        return NullWorkerConnector()


class _BrittleHalf(NullSchedulerConnector):
    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def _raise_for(self, request: Request, call: str) -> None:
        if call == self._call and request.request_id == "b":
            raise RuntimeError("boom")

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        self._raise_for(request, "get_num_new_matched_tokens")
        is_b = request.request_id == "b"
        is_async = self._call == "update_state_after_alloc (async)"
        return ExternalMatch(num_tokens=4 if is_b else 0, is_async=is_async)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self._raise_for(request, "update_state_after_alloc")
        self._raise_for(request, "update_state_after_alloc (async)")

    def cancel(self, transfer: TransferKey) -> None:
        failure = LoadFailure(transfer=transfer, num_valid_tokens=0, cause="cancelled")
        self.update_connector_output(TransferReport(failed=(failure,)))

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        if self._call == "request_finished":
            raise RuntimeError("boom")
        return None


class Broken(AnyToken):
    """Fails where it is told to, from `compile` on."""

    def __init__(self, fails_in: str) -> None:
        if fails_in == "compile":
            raise RuntimeError("boom")
        self._fails_in = fails_in

    def accept(self, token_id: int) -> bool:
        if self._fails_in == "accept":
            raise RuntimeError("boom")
        return self._fails_in != "refuse"

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        super().fill_bitmask(bits)
        if self._fails_in == "fill_bitmask":
            raise RuntimeError("boom")


def _assert_only_b_fails(engine: Engine, **options: Any) -> None:
    engine.add("a", 9, max_tokens=5)
    engine.add("b", 9, max_tokens=5, **options)
    engine.add("c", 9, max_tokens=5)
    engine.run()
    assert engine.reason("b") is FinishReason.ERROR
    assert engine.end("b").cause
    engine.assert_as_if_alone("a", "c")
    engine.assert_idle()


@pytest.mark.parametrize("hook", ["admit", "chunk"])
def test_a29_a_policy_hook_that_raises_ends_its_request_alone(hook: str) -> None:
    """The request that a policy cannot handle ends with an error; the others finish."""
    _assert_only_b_fails(Engine(policy=RaisesForB(hook), max_num_batched_tokens=8, max_num_seqs=4))


@pytest.mark.parametrize(
    "call",
    [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "update_state_after_alloc (async)",
    ],
)
def test_a29_a_connector_call_that_raises_ends_its_request_alone(call: str) -> None:
    """The request that a connector cannot handle ends with an error; the others finish."""
    _assert_only_b_fails(Engine(connector=BrittleConnector(call)))


def test_a29_a_connector_that_raises_at_the_end_costs_nobody_anything() -> None:
    """When the farewell to a connector raises, requests end as they would have."""
    engine = Engine(connector=BrittleConnector("request_finished"))
    for name in "ac":
        engine.add(name, 9, max_tokens=5)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("place", ["compile", "fill_bitmask", "accept", "refuse"])
def test_a29_a_grammar_that_raises_ends_its_request_alone(place: str) -> None:
    """The request whose grammar breaks ends with an error; the others finish."""
    grammar = CompilesAtOnce(lambda request: Broken(place))
    _assert_only_b_fails(Engine(grammar=grammar), structured_output="any")


# A30


def test_a30_a_request_runs_past_one_whose_grammar_is_not_ready_and_then_fails() -> None:
    """A head that waits for its grammar holds up nobody; when that fails, it alone ends."""
    grammars = CompilesLater()
    engine = Engine(grammar=grammars)
    engine.add("head", 8, structured_output="any")
    engine.add("plain", 8, max_tokens=2)
    assert engine.step() == {"plain": 8}
    assert engine.scheduler.explain("head").code is SkipCode.WAITING_FOR_GRAMMAR
    grammars.futures["head"].set_exception(ValueError("no such grammar"))
    engine.run()
    assert engine.reason("head") is FinishReason.ERROR
    assert "no such grammar" in (engine.end("head").cause or "")
    engine.assert_as_if_alone("plain")
    engine.assert_idle()


def test_a30_a_grammar_that_never_comes_has_a_deadline() -> None:
    """A request whose grammar is not there in time ends with an error that says so."""
    engine = Engine(grammar=CompilesLater(), grammar_timeout_s=5.0)
    engine.add("x", 8, structured_output="any")
    assert engine.scheduler.next_wakeup() == 5.0
    engine.run()
    assert engine.reason("x") is FinishReason.ERROR
    assert engine.clock.now() == 5.0
    engine.assert_idle()


def test_a30_an_abort_while_the_grammar_compiles_leaves_nothing() -> None:
    """The compilation is cancelled, and its late result is nobody's."""
    grammars = CompilesLater()
    engine = Engine(grammar=grammars)
    engine.add("x", 8, structured_output="any")
    engine.abort("x")
    assert grammars.futures["x"].cancelled()
    engine.run()
    assert engine.reason("x") is FinishReason.ABORT
    assert engine.scheduler.next_wakeup() is None
    engine.assert_idle()
