"""What the scheduler promises of any request and step: deadlines, pauses, order, its own check."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_rig import Rig

from pdcore import FCFS, FinishReason, ModelRunnerOutput, Request, SamplingParams
from pdcore.connector.null import NullSchedulerConnector
from pdcore.errors import DuplicateRequest, InvariantBroken
from pdcore.messages import TransferKey, TransferReport
from pdcore.scheduler import SkipCode


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    """Running and waiting requests time out on an empty step too, and say where they were."""
    rig = Rig(limits={"max_num_seqs": 1})
    rig.add("running", max_tokens=50, deadline=10.0)
    rig.add("waiting", deadline=10.0)
    rig.add("patient")
    rig.driver.step()
    assert rig.scheduler.next_wakeup() == 10.0
    rig.clock.advance(10.0)
    assert rig.scheduler.has_work()
    rig.driver.step()
    for name, status in (("running", "RUNNING"), ("waiting", "WAITING")):
        end = rig.driver.delivered[name].end
        assert end is not None
        assert end.finish_reason is FinishReason.TIMEOUT
        assert status in (end.cause or "")
    assert rig.ends()["patient"] is FinishReason.LENGTH


def test_pause_plans_nothing_and_resume_goes_on() -> None:
    """A paused scheduler still ends requests whose deadline passes."""
    rig = Rig()
    rig.add("r")
    rig.add("late", deadline=5.0)
    rig.driver.step()
    rig.scheduler.pause()
    assert not rig.scheduler.schedule().rows.size
    assert rig.scheduler.explain("r").code is SkipCode.PAUSED


def test_a_paused_scheduler_has_no_work_and_a_report_is_work() -> None:
    """A loop neither spins while paused nor sleeps over news that it has in hand."""
    rig = Rig(connector=NullSchedulerConnector())
    rig.add("r")
    rig.scheduler.pause()
    assert not rig.scheduler.has_work()
    plan = rig.scheduler.schedule()
    report = TransferReport(finished_recving=(TransferKey(99, 1),))
    nothing = np.zeros(0, np.int32)
    result = ModelRunnerOutput(
        rows=nothing,
        epochs=nothing,
        sampled_token_ids=nothing.reshape(0, 1),
        transfer_report=report,
    )
    rig.scheduler.update_from_output(plan, result)
    assert rig.scheduler.has_work()
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert not rig.scheduler.has_work()
    assert rig.scheduler.stats().num_late_events == 1
    rig.scheduler.resume()
    assert rig.ends() == {"r": FinishReason.LENGTH}


def test_a_result_in_another_order_gives_each_request_its_own_token() -> None:
    """A runner may return its rows in any order, in steps of decodes as in others."""
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.add(name, 3, max_tokens=6)
    for _ in range(5):
        output = rig.scheduler.schedule()
        order = np.argsort(-output.rows)
        result = ModelRunnerOutput(
            rows=output.rows[order],
            epochs=output.epochs[order],
            sampled_token_ids=(10 + output.rows[order]).astype(np.int32)[:, None],
        )
        told = rig.scheduler.update_from_output(output, result)
        tokens = dict(zip(told.request_ids, told.token_ids.tolist(), strict=True))
        assert tokens == {"a": 10, "b": 11, "c": 12}
        rig.scheduler.check()


def test_what_several_plans_share_cannot_be_written_to() -> None:
    """A runner that scribbles on its plan spoils no later one."""
    rig = Rig()
    rig.add("a", 3, max_tokens=6)
    output = rig.scheduler.schedule()
    rig.runner.execute_model(output)
    rig.scheduler.update_from_output(output, rig.runner.sample_tokens(None))
    output = rig.scheduler.schedule()
    for column in (output.rows, output.epochs, output.num_scheduled_tokens, output.samples):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


def test_an_id_is_free_again_once_its_end_was_delivered() -> None:
    """Before, the end of the former request would seem to be that of the next."""
    told: list[Request] = []
    connector = NullSchedulerConnector()
    connector.request_refused = told.append  # type: ignore[method-assign]
    rig = Rig(connector=connector)
    rig.add("r", 5)
    rig.driver.step()
    rig.driver.abort(["r"])
    with pytest.raises(DuplicateRequest, match="was not delivered yet"):
        rig.scheduler.add_request(Request("r", [1, 2], kv_transfer_params={"a": 1}))
    # It comes again, so nobody gives its ticket back.
    assert not told
    rig.driver.step()
    assert rig.driver.delivered["r"].finish_reason is FinishReason.ABORT
    rig.add("r", 6)
    assert rig.ends() == {"r": FinishReason.LENGTH}


def test_a_request_of_a_subclass_stays_one() -> None:
    """A policy may look at fields of its own."""

    class Team(Request):
        team = "blue"

    class ByTeam(FCFS):
        def key(self, request: Request) -> str:
            return request.team  # type: ignore[attr-defined]

    rig = Rig(policy=ByTeam())
    rig.scheduler.add_request(Team("a", [1, 2], sampling=SamplingParams(max_tokens=1)))
    assert rig.scheduler.stats().num_waiting == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_level", True), ("num_calm_steps", 99), ("num_with_eos", 3), ("num_to_refresh", 1)],
)
def test_check_sees_what_the_table_remembers_wrongly(name: str, value: object) -> None:
    """A step of decodes rests on it."""
    rig = Rig()
    rig.add("a", 5, max_tokens=6)
    rig.scheduler.schedule()
    rig.scheduler.check()
    table = rig.scheduler._core.table
    setattr(table, name, value)
    if name == "is_level":
        table.num_computed[0] -= 1
    with pytest.raises(InvariantBroken, match=name):
        rig.scheduler.check()
