"""The queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcore import Request
from pdcore.kvcache import TokenSequence
from pdcore.scheduler.alarms import Alarms
from pdcore.scheduler.state import RequestState
from pdcore.scheduler.waiting import WaitingTable


def make_state(uid: int, key: object) -> RequestState:
    request = Request(f"r{uid}", [1] * (uid % 5 + 1))
    return RequestState(
        uid=uid,
        request_id=request.request_id,
        request=request,
        sequence=TokenSequence(request.prompt_token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        limit=9,
        limited_by_pool=False,
        arrival_time=float(uid),
        queue_key=(key, 0),
    )


@given(st.data())
def test_the_queue_is_a_stable_order_by_key(data: st.DataObject) -> None:
    """Equals keep their order of joining; those that return go ahead of their equals, or back."""
    table, model, away = WaitingTable(), [], []
    for uid in range(data.draw(st.integers(0, 40))):
        kind = data.draw(st.sampled_from(["join", "ahead", "remove", "put back"]))
        if kind in ("join", "ahead"):
            state = make_state(uid, data.draw(st.integers(0, 2)))
            table.join(state, ahead=kind == "ahead")
            model.append(state)
        elif kind == "remove" and model:
            state = model.pop(data.draw(st.integers(0, len(model) - 1)))
            table.remove(state)
            away.append(state)
        elif kind == "put back" and away:
            state = away.pop()
            table.put_back(state)
            model.append(state)
        model.sort(key=lambda state: state.queue_key)
        assert list(table) == model
        assert table.peek() is (model[0] if model else None)
        assert len(table) == len(model)
        assert all(state not in table for state in away)
        assert sorted(s.uid for s in table.view().states) == sorted(s.uid for s in model)


@given(st.lists(st.tuples(st.sampled_from(["set", "cancel", "due"]), st.integers(0, 4))))
def test_alarms_ring_once_in_order_and_never_after_they_are_cancelled(
    calls: list[tuple[str, int]],
) -> None:
    """Setting one again moves it."""
    alarms, model, now = Alarms(), {}, 0
    for place, (kind, number) in enumerate(calls):
        if kind == "set":
            model[number] = (now + number, place)
            alarms.set(number, now + number)
        elif kind == "cancel":
            model.pop(number, None)
            alarms.cancel(number)
        else:
            now += number
            due = sorted((entry, name) for name, entry in model.items() if entry[0] <= now)
            assert alarms.take_due(now) == [name for _, name in due]
            for _, name in due:
                del model[name]
        assert alarms.next() == min((time for time, _ in model.values()), default=None)


class Odd:
    """A key that compares with nothing, and says so in its own way."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __lt__(self, other: object) -> bool:
        raise RuntimeError(f"{self.number} compares with nothing")

    __gt__ = __lt__


keys = (
    st.integers(-2, 2)
    | st.floats(allow_nan=True)
    | st.text(max_size=1)
    | st.none()
    | st.tuples(st.integers(0, 1), st.integers(0, 1))
    | st.tuples(st.integers(0, 1), st.text(max_size=1))
    | st.builds(Odd, st.integers())
)


@given(st.lists(keys, max_size=12), st.data())
def test_keys_that_do_not_compare_never_stop_the_queue(
    odd: list[object], data: st.DataObject
) -> None:
    """Whatever a policy's keys are, joining, leaving and looking go on, and nobody is lost."""
    table, inside = WaitingTable(), []
    for uid, key in enumerate(odd):
        state = make_state(uid, key)
        table.join(state, ahead=data.draw(st.booleans()))
        inside.append(state)
        if data.draw(st.booleans()):
            first = table.peek()
            assert first in inside
            table.remove(first)
            inside.remove(first)
    assert {state.uid for state in table} == {state.uid for state in inside}
    for _ in range(len(inside)):
        first = table.peek()
        assert first is not None
        table.remove(first)
    assert table.peek() is None


@given(st.lists(st.text(max_size=2), max_size=12))
def test_keys_of_any_kind_that_do_compare_are_obeyed(texts: list[str]) -> None:
    """Text, for one."""
    table = WaitingTable()
    states = [make_state(uid, text) for uid, text in enumerate(texts)]
    for state in states:
        table.join(state)
    assert list(table) == sorted(states, key=lambda state: state.queue_key)
