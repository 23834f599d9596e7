"""`MultiConnector`: hand-overs of several, and whose parameters are whose."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multi_halves import BLOCKS, HAND_OVER, Half, a_request, loading, two

from odd_values import DEEP
from pdcore.connector import ConnectorEvents, HandOver
from pdcore.connector.multi.params import join_params
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.errors import InvalidTransferParams
from pdcore.request import Request


def finished(multi: MultiSchedulerConnector, params: dict[str, Any] | None) -> HandOver | None:
    request = a_request(params)
    multi.request_added(request, 1)
    return multi.request_finished(request, 1, BLOCKS)


def test_the_parameters_of_one_are_passed_on_unchanged() -> None:
    """An engine with that connector alone can read them."""
    _, far, multi = two()
    assert finished(multi, HAND_OVER) is None
    params = {"kind": "far", "blocks": [1, 2]}
    far.wish = HandOver(kv_transfer_params=params)
    assert finished(multi, HAND_OVER) == far.wish
    far.wish = HandOver(transfer_id="t", kv_transfer_params=params)
    hand_over = finished(multi, HAND_OVER)
    assert hand_over is not None
    assert hand_over.kv_transfer_params == params
    assert hand_over.transfer_id is not None


def test_parameters_that_another_might_take_for_its_own_keep_their_name() -> None:
    """Two connectors of one kind: what one hands over alone is still that one's."""
    halves = {"a": Half("x"), "b": Half("x")}
    multi = MultiSchedulerConnector(halves)
    params = {"do_remote_prefill": True, "kind": "x"}
    halves["b"].wish = HandOver(kv_transfer_params=params)
    hand_over = finished(multi, HAND_OVER)
    assert hand_over is not None
    multi.request_added(a_request(hand_over.kv_transfer_params), 2)
    assert (halves["a"].added[-1], halves["b"].added[-1]) == (None, params)


@pytest.mark.usefixtures("quiet_log")
def test_one_that_fails_to_hand_over_leaves_it_to_the_other() -> None:
    """A hand-over by one of two is a hand-over."""
    near, far, multi = two()
    near.bad = {"request_finished"}
    near.wish = far.wish = HandOver(transfer_id="t", kv_transfer_params={"kind": "far"})
    hand_over = finished(multi, HAND_OVER)
    assert hand_over is not None
    assert hand_over.kv_transfer_params == {"kind": "far"}
    far.said = ConnectorEvents(finished_sending=("t",))
    assert multi.take_events().finished_sending == (hand_over.transfer_id,)


def joint_params(near: Any = None, far: Any = None) -> dict[str, Any]:
    near_part = {"do_remote_prefill": True, "kind": "near", **(near or {})}
    far_part = {"do_remote_prefill": True, "kind": "far", **(far or {})}
    params = join_params({"near": near_part, "far": far_part})
    assert params is not None
    return json.loads(json.dumps(params))


@pytest.mark.parametrize("order", [("near", "far"), ("far", "near")])
def test_the_parameters_of_several_find_theirs_through_json(order: tuple[str, ...]) -> None:
    """Whatever the order on this side is; nobody sees the other's."""
    halves = {name: Half(name) for name in order}
    multi = MultiSchedulerConnector(halves)
    params = joint_params()
    assert multi.recognizes(params)
    request = a_request(params)
    multi.request_added(request, 1)
    multi.request_finished(request, 1, BLOCKS)
    multi.request_refused(request)
    for name, half in halves.items():
        own = {"do_remote_prefill": True, "kind": name}
        assert half.added == half.finished == half.refused == [own]


def test_a_load_is_for_the_request_as_its_connector_knows_it() -> None:
    """With the parameters that it was shown, also when the load is undone."""
    _, far, multi = two()
    far.match = 11
    undone: list[Any] = []
    far.undo_alloc = lambda *call: undone.append(call)  # type: ignore[method-assign]
    request = a_request(joint_params())
    multi.undo_alloc(request, loading(multi, request))
    (load,) = far.loads
    assert load.request.kv_transfer_params == far.added[0]
    assert undone == [(load.request, load)]


def test_an_engine_in_the_middle_hands_over_what_it_was_handed() -> None:
    """A wish for a hand-over reaches all, beside the parameters of each."""
    near, far, multi = two()
    multi.request_added(a_request({**joint_params(), **HAND_OVER}), 1)
    (near_params,), (far_params,) = near.added, far.added
    assert near_params["do_remote_decode"] is far_params["do_remote_decode"] is True
    assert (near_params["kind"], far_params["kind"]) == ("near", "far")
    far.added.clear()
    multi.request_added(a_request({"do_remote_prefill": True, "kind": "near", **HAND_OVER}), 2)
    assert far.added == [HAND_OVER]


def test_unchanged_parameters_go_to_the_first_that_reads_and_accepts_them() -> None:
    """The others see the request without; so does one that cannot use them after all."""
    halves = {"none": Half(), "a": Half("x"), "b": Half("x"), "c": Half("x")}
    refuse = halves["a"].request_added

    def refuse_params(request: Request, uid: int) -> None:
        if request.kv_transfer_params is not None:
            raise InvalidTransferParams("another network")
        refuse(request, uid)

    halves["a"].request_added = refuse_params  # type: ignore[method-assign]
    multi = MultiSchedulerConnector(halves)
    params = {"do_remote_prefill": True, "kind": "x"}
    multi.request_added(a_request(params), 1)
    assert [half.added for half in halves.values()] == [[None], [None], [params], [None]]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({**joint_params(), "version": 2}, "are of version 2"),
        ({**joint_params(), "version": True}, "are of version True"),
        ({**joint_params(), "version": DEEP}, "are of version <list>"),
        ({**joint_params(), "do_remote_prefill": False}, "missing or malformed"),
        ({**joint_params(), "kind": DEEP}, "of kind <list>"),
        ({**joint_params(), "connectors": DEEP}, "missing or malformed"),
        ({**joint_params(), "connectors": {"near": DEEP}}, "expected a mapping"),
        ({**joint_params(), "connectors": []}, "missing or malformed"),
        ({**joint_params(), "connectors": {}}, "missing or malformed"),
        ({**joint_params(), "connectors": {"near": [1]}}, "expected a mapping"),
        ({**joint_params(), "connectors": {"nowhere": {}}}, "for a connector 'nowhere'"),
        (joint_params(near={"is_bad": True}), "connector 'near': not for 'near'"),
        (joint_params(far={"is_bad": True}), "connector 'far': not for 'far'"),
        ({"do_remote_prefill": True, "kind": "else"}, "of kind 'else' are for none of"),
        ({}, "of kind None are for none of"),
        ({"kind": "near", "is_bad": True}, "connector 'near': not for 'near'"),
    ],
)
def test_bad_parameters_are_refused_and_everybody_lets_go(
    params: dict[str, Any], words: str
) -> None:
    """The error says what is wrong; those who had accepted hear that the request is over."""
    near, far, multi = two()
    request = a_request(params)
    with pytest.raises(InvalidTransferParams, match=words):
        multi.request_added(request, 1)
    assert near.finished == near.added
    assert far.finished == far.added


@pytest.mark.usefixtures("quiet_log")
def test_a_refused_request_is_told_to_all_that_may_have_promised_something() -> None:
    """One that raises, or cannot read its part, keeps no other from hearing it."""
    near, far, multi = two()
    near.bad = {"request_refused"}
    multi.request_refused(a_request(joint_params()))
    assert far.refused == [{"do_remote_prefill": True, "kind": "far"}]
    multi.request_refused(a_request({"kind": "near"}))
    assert (len(near.refused), len(far.refused)) == (2, 1)
