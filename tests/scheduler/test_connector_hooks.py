"""The connector's hooks, as the scheduler calls them: loads, answers that do not come, errors."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import Rig

from pdcore import FinishReason, Request
from pdcore.connector.base import ExternalMatch
from pdcore.connector.null import NullSchedulerConnector
from pdcore.scheduler import SkipCode


class RemoteConnector(NullSchedulerConnector):
    """Has the KV of 12 tokens of the request named "remote"."""

    def __init__(self, *, is_async: bool) -> None:
        super().__init__()
        self.is_async = is_async

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        num_tokens = 12 - num_local_tokens if request.request_id == "remote" else 0
        return ExternalMatch(num_tokens=num_tokens, is_async=self.is_async)


@pytest.mark.parametrize("is_async", [True, False])
def test_blocks_of_a_request_admitted_before_are_not_given_to_a_load(is_async: bool) -> None:
    """6 blocks, 4 of them for the first in the queue: a load that needs 4 waits."""
    rig = Rig(
        num_blocks=7,
        connector=RemoteConnector(is_async=is_async),
        limits={"max_num_batched_tokens": 32},
    )
    rig.add("first", prompt=range(20, 36), max_tokens=1)
    rig.add("remote", prompt=range(4, 20))
    output = rig.scheduler.schedule()
    assert [new.request_id for new in output.scheduled_new_reqs] == ["first"]
    skip = rig.scheduler.explain("remote")
    assert (skip.code, skip.needed, skip.available) == (SkipCode.NO_BLOCKS, 4, 2)
    rig.scheduler.check()


class BrokenConnector(NullSchedulerConnector):
    """One of its methods raises."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{method} is broken")

        setattr(self, method, broken)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("get_num_new_matched_tokens", FinishReason.ERROR),
        ("take_events", FinishReason.LENGTH),
        ("build_connector_meta", FinishReason.LENGTH),
        ("request_finished", FinishReason.LENGTH),
    ],
)
def test_c28_a_connector_that_raises_never_takes_the_engine_down(
    method: str, reason: FinishReason, caplog: pytest.LogCaptureFixture
) -> None:
    """What concerns one request ends that one; the rest is logged and goes on."""
    rig = Rig(connector=BrokenConnector(method))
    for name in ("one", "two"):
        rig.add(name)
    assert rig.ends() == {"one": reason, "two": reason}
    if reason is FinishReason.LENGTH:
        assert f"{method} is broken" in caplog.text


@pytest.mark.parametrize(
    "method", ["take_events", "update_connector_output", "build_connector_meta", "next_wakeup"]
)
def test_a_connector_that_always_raises_fills_no_log(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these is asked in every step: the first failure is told, and which method it was."""
    rig = Rig(connector=BrokenConnector(method))
    rig.add("a")
    assert rig.ends() == {"a": FinishReason.LENGTH}
    rig.scheduler.next_wakeup()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert f"{method}() raised" in told[0].getMessage()


class OddConnector(NullSchedulerConnector):
    """Answers with something that is no answer."""

    def __init__(self, method: str, answer: Any) -> None:
        super().__init__()
        setattr(self, method, lambda *_: answer)


@pytest.mark.parametrize(
    ("method", "answer"), [("request_finished", True), ("take_events", None), ("take_events", ())]
)
def test_a_connector_that_answers_nonsense_is_as_one_that_raises(
    method: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody loses a token by it, and the log says what it answered."""
    rig = Rig(connector=OddConnector(method, answer))
    for name in ("one", "two"):
        rig.add(name)
    assert rig.ends() == {"one": FinishReason.LENGTH, "two": FinishReason.LENGTH}
    assert f"it returned {answer!r}" in caplog.text


class Undecided(NullSchedulerConnector):
    """Always asks to be asked again."""

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> Any:
        return None


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_a_connector_that_never_decides_holds_nobody_up_for_ever(on_load_failure: str) -> None:
    """ "Ask me later" has a deadline too, and an abandoned plan does not move it."""
    limits = {"on_load_failure": on_load_failure, "load_timeout_s": 5.0}
    rig = Rig(connector=Undecided(), limits=limits)
    rig.add("r")
    rig.driver.step()
    assert rig.scheduler.explain("r").code is SkipCode.CONNECTOR_NOT_READY
    rig.clock.advance(4.0)
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert rig.scheduler.next_wakeup() == 5.0
    (reason,) = rig.ends().values()
    assert reason is (FinishReason.ERROR if on_load_failure == "fail" else FinishReason.LENGTH)
    assert rig.clock.now() == 5.0
