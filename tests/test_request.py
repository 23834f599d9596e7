"""Requests are refused at construction when they can never be served."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odd_values import DEEP
from pdcore import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.errors import IllegalTransition, InvalidRequest
from pdcore.kvcache import TokenSequence
from pdcore.request import TRANSITIONS
from pdcore.scheduler.state import RequestState, move


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", DEEP),
        pytest.param("max_tokens", 10**5000, id="max_tokens-digits"),
        ("min_tokens", DEEP),
        ("temperature", DEEP),
        ("top_k", DEEP),
        ("seed", DEEP),
        ("stop_token_ids", DEEP),
        ("stop_token_ids", (10**5000,)),
        ("logprobs", DEEP),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", 2**31),
        ("temperature", 10**400),
        ("top_k", 2**63),
        ("seed", "x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", (1.7,)),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("n", 2),
        ("logprobs", 1),
        ("presence_penalty", 0.5),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name(name: str, value: object) -> None:
    """The one line that the user sees names the parameter and its value."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "prompt", [[], [[1, 2]], DEEP, [1.5], ["a"], [-1], [2**31], np.zeros((2, 2), np.int32), 5]
)
def test_a_bad_prompt_is_refused(prompt: object) -> None:
    """An empty prompt, a nested one, and ids that are none."""
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        Request("r", prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 2**63),
        ("priority", "x"),
        ("eos_token_id", "x"),
        ("eos_token_id", 2**31),
        ("deadline", float("nan")),
        ("deadline", 10**400),
        ("deadline", "x"),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("lora", "a\udfff"),
        ("lora", []),
        ("sampling", None),
        ("kv_transfer_params", "x"),
        ("kv_transfer_params", [1]),
        *((name, DEEP) for name in ("request_id", "priority", "eos_token_id", "sampling")),
        *((name, DEEP) for name in ("tenant", "lora", "deadline", "kv_transfer_params")),
        pytest.param("deadline", 10**5000, id="deadline-digits"),
    ],
)
def test_a_bad_field_is_refused_by_name(name: str, value: object) -> None:
    """What the scheduler's columns could not hold never gets there."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        Request(**{"request_id": "r", "prompt_token_ids": [1], name: value})
    assert "\n" not in str(caught.value)


def test_a_request_keeps_its_own_copy_of_the_prompt() -> None:
    """Writing to the caller's array changes nothing, and nobody can write to the request's."""
    prompt = np.array([1, 2, 3], np.int32)
    request = Request("r", prompt)
    prompt[0] = 9
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 9
    assert attrs.evolve(request, priority=1).prompt_token_ids is request.prompt_token_ids


@given(st.lists(st.sampled_from(RequestStatus), max_size=8))
def test_status_changes_only_along_the_table(path: list[RequestStatus]) -> None:
    """A move that the table does not allow raises, tells the history, and changes nothing."""
    request = Request("r", [1])
    state = RequestState(
        uid=1,
        request_id="r",
        request=request,
        sequence=TokenSequence(request.prompt_token_ids),
        num_prompt_tokens=1,
        limit=2,
        limited_by_pool=False,
        arrival_time=0.0,
        queue_key=(0, 0),
    )
    walked = deque([RequestStatus.WAITING])
    for target in path:
        if target in TRANSITIONS[state.status]:
            move(state, target)
            walked.append(target)
        else:
            with pytest.raises(IllegalTransition, match=" -> ".join(s.value for s in walked)):
                move(state, target)
        assert state.status is walked[-1]


@pytest.mark.parametrize("prompt", [[True, False], [1.5], [None], ["1"], [1, None], [2**31], [-1]])
def test_a_list_of_what_are_no_token_ids_is_refused(prompt: list[object]) -> None:
    """In words, whichever way the list is read."""
    with pytest.raises(InvalidRequest):
        Request("r", prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["Once upon a time", b"Once", None])
def test_a_text_in_place_of_token_ids_is_called_one(prompt: object) -> None:
    """The error says that nothing here turns text into ids."""
    told = f"prompt_token_ids is a {type(prompt).__name__}: pass token ids; pdcore has no tokenizer"
    with pytest.raises(InvalidRequest, match=told):
        Request("r", prompt)  # type: ignore[arg-type]


def test_a_finish_reason_reads_as_text_wherever_it_is_printed() -> None:
    """Padded in a table as well; it is a number where it is compared."""
    assert f"{FinishReason.LENGTH} {FinishReason.LENGTH:>8}|" == "length   length|"
    assert FinishReason.LENGTH == 2


def test_nobody_can_change_a_prompt_afterwards() -> None:
    """Not the owner of the array that it was made from, nor whoever reads it."""
    array = np.arange(1, 5, dtype=np.int32)
    array.flags.writeable = False
    request = Request("r", array)
    array.flags.writeable = True
    array[0] = 77
    assert request.prompt_token_ids.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="WRITEABLE"):
        request.prompt_token_ids.flags.writeable = True


@pytest.mark.parametrize("name", ["logprobs", "presence_penalty", "encoder_inputs", "n"])
def test_a_reserved_name_with_a_value_of_any_kind_is_refused(name: str) -> None:
    """Also one that does not compare."""
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: np.array([1, 2])})


def test_stop_tokens_may_be_an_array() -> None:
    """Any sequence of integers."""
    assert SamplingParams(stop_token_ids=np.array([2, 3])).stop_token_ids == (2, 3)
    assert SamplingParams(stop_token_ids=np.array([], int)).stop_token_ids == ()


@attrs.frozen(kw_only=True)
class Careful(SamplingParams):
    """Has a default of its own, in a slot, as attrs makes them unless it is told otherwise."""

    top_p: float = 0.9


@attrs.frozen(eq=False)
class Guest(Request):
    """The same of a request."""

    tenant: str | None = attrs.field(default="guests", kw_only=True)


def test_a_subclass_may_have_defaults_of_its_own() -> None:
    """They are used, and checked as all others are."""
    assert Careful().top_p == 0.9
    with pytest.raises(InvalidRequest, match="top_p"):
        Careful(top_p=2.0)
    assert Guest("r", [1]).arriving_at(2.0).tenant == "guests"
    with pytest.raises(InvalidRequest, match="tenant"):
        Guest("r", [1], tenant=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_a_request_keeps_its_prompt_as_it_is(copied: Callable[[Request], Request]):
    """Nobody can write to it there either, and nothing else is lost."""
    request = Request("r", [1, 2, 3], priority=4, sampling=SamplingParams(max_tokens=2))
    again = copied(request)
    assert again.prompt_token_ids.tolist() == [1, 2, 3]
    assert (again.request_id, again.priority, again.sampling) == ("r", 4, request.sampling)
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        again.prompt_token_ids.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        again.prompt_token_ids[0] = 9
