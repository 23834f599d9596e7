"""Structured output: waiting for a grammar, and tokens that it does not allow."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scheduler_rig import VOCAB_SIZE, Rig

from grammars import AnyToken, CompilesAtOnce, CompilesLater
from pdcore import FinishReason, Request, RequestStatus
from pdcore.scheduler import GrammarMatcher


class EvenTokens(GrammarMatcher):
    """Allows even tokens only."""

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        bits[:] = 0x55555555


def test_a30_a_request_waits_for_its_grammar_without_holding_up_others() -> None:
    """It draws allowed tokens once compiled; a failed, late or aborted one ends alone."""
    compiler = CompilesLater()
    rig = Rig(grammar=compiler, limits={"grammar_timeout_s": 5.0})
    for name in ("good", "fails", "late", "aborted"):
        rig.add(name, structured_output="even", max_tokens=6)
    rig.add("plain", max_tokens=2)
    rig.driver.step()
    assert rig.scheduler.status("good") is RequestStatus.WAITING_FOR_GRAMMAR
    assert rig.scheduler.status("plain") is RequestStatus.RUNNING
    compiler.futures["good"].set_result(EvenTokens())
    compiler.futures["fails"].set_exception(ValueError("no such rule"))
    rig.driver.abort(["aborted"])
    rig.driver.step()
    rig.clock.advance(5.0)
    assert rig.ends() == {
        "good": FinishReason.LENGTH,
        "fails": FinishReason.ERROR,
        "late": FinishReason.ERROR,
        "aborted": FinishReason.ABORT,
        "plain": FinishReason.LENGTH,
    }
    assert all(token % 2 == 0 for token in rig.driver.delivered["good"].token_ids)
    assert compiler.futures["aborted"].cancelled()
    assert compiler.futures["late"].cancelled()


class BrokenFuture(Future[GrammarMatcher]):
    """One of its methods raises."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def broken(*_: Any) -> Any:
            raise OSError("broken")

        setattr(self, method, broken)


class CompilesBroken(CompilesLater):
    """Has a broken future for "strict"."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future = self.futures[request.request_id] = BrokenFuture(self._method)
        return future


@pytest.mark.parametrize("method", ["done", "exception", "cancelled", "cancel"])
def test_a_future_that_raises_costs_its_request_alone(method: str) -> None:
    """When it is asked whether it is done, and when it is called off."""
    compiler = CompilesBroken(method)
    rig = Rig(grammar=compiler)
    rig.add("strict", structured_output="even", max_tokens=6)
    rig.add("plain", max_tokens=2)
    rig.scheduler.has_work()
    if method == "cancel":
        rig.driver.abort(["strict"])
        rig.scheduler.check()
    else:
        compiler.futures["strict"].set_result(EvenTokens())
    end = FinishReason.ABORT if method == "cancel" else FinishReason.ERROR
    assert rig.ends() == {"strict": end, "plain": FinishReason.LENGTH}


class AnswersNothing(CompilesLater):
    """Has no future to give."""

    def compile(self, request: Request) -> Any:
        return None


@pytest.mark.parametrize("compiler", [CompilesLater(), AnswersNothing()], ids=["matcher", "future"])
def test_a_backend_that_returns_none_costs_its_request_alone(compiler: CompilesLater) -> None:
    """For a matcher, which would let it run without its grammar, or for the future of one."""
    rig = Rig(grammar=compiler)
    rig.add("strict", structured_output="even", max_tokens=6)
    rig.add("plain", max_tokens=2)
    for future in compiler.futures.values():
        future.set_result(None)
    assert rig.ends() == {"strict": FinishReason.ERROR, "plain": FinishReason.LENGTH}


class Vague(AnyToken):
    """Answers what is neither true nor false."""

    def accept(self, token_id: int) -> bool:
        return np.array([True, True])  # type: ignore[return-value]


class Blank(AnyToken):
    """Cannot say what it allows."""

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        raise LookupError("the true reason")


@pytest.mark.parametrize(
    ("matcher", "words"), [(Vague(), "its grammar does not allow"), (Blank(), "the true reason")]
)
def test_a_matcher_that_answers_nonsense_costs_its_request_alone(
    matcher: GrammarMatcher, words: str
) -> None:
    """The cause says what is wrong with it."""
    rig = Rig(grammar=CompilesAtOnce(lambda request: matcher, vocab_size=VOCAB_SIZE))
    rig.add("strict", structured_output="any")
    rig.add("plain")
    assert rig.ends() == {"strict": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    end = rig.driver.delivered["strict"].end
    assert end is not None
    assert words in (end.cause or "")
    rig.scheduler.check()


def test_a_token_that_the_grammar_does_not_allow_ends_its_request() -> None:
    """A runner that ignores the mask is found out, and nobody else suffers."""
    compiler = CompilesLater()
    rig = Rig(grammar=compiler)
    rig.add("strict", structured_output="even", max_tokens=60)
    rig.add("plain", max_tokens=20)
    compiler.futures["strict"].set_result(EvenTokens())
    while rig.scheduler.has_requests():
        plan = rig.scheduler.schedule()
        rig.runner.execute_model(plan)
        rig.driver._collect(
            rig.scheduler.update_from_output(plan, rig.runner.sample_tokens(None)).outputs
        )
    ends = {name: got.finish_reason for name, got in rig.driver.delivered.items()}
    assert ends == {"strict": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    assert rig.driver.delivered["strict"].token_ids[-1] % 2 == 1


def test_who_gives_way_while_its_token_is_drawn_is_constrained_all_the_same() -> None:
    """The mask may be asked for after a later plan, or a reset, took its row."""
    compiler = CompilesLater()
    rig = Rig(grammar=compiler)
    rig.add("even", structured_output="even", max_tokens=3)
    rig.driver.step()
    compiler.futures["even"].set_result(EvenTokens())
    output = rig.scheduler.schedule()
    assert rig.scheduler.reset_prefix_cache(preempt_running=True)
    bitmask = rig.scheduler.get_grammar_bitmask(output)
    assert bitmask is not None
    assert (bitmask.rows, bitmask.epochs) == (output.rows, output.epochs)
    assert (bitmask.bits == 0x55555555).all()
    rig.runner.execute_model(output)
    rig.scheduler.update_from_output(output, rig.runner.sample_tokens(bitmask))
    assert rig.ends() == {"even": FinishReason.LENGTH}
