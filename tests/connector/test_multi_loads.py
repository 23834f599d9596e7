"""`MultiConnector`: who brings a load, and what happens when one cannot."""

from __future__ import annotations

import pytest
from multi_halves import KEY, a_load, a_request, loading, two

from pdcore.connector import ConnectorEvents, ExternalMatch
from pdcore.messages import LoadFailure, TransferKey


def test_the_first_that_has_something_brings_it() -> None:
    """Those after it are not asked; those before it had nothing."""
    near, far, multi = two()
    request = a_request()
    multi.request_added(request, 1)
    assert multi.get_num_new_matched_tokens(request, 4) == ExternalMatch(num_tokens=0)
    far.match = 7
    assert multi.get_num_new_matched_tokens(request, 4) == ExternalMatch(
        num_tokens=7, is_async=True
    )
    near.match = 3
    multi.get_num_new_matched_tokens(request, 4)
    multi.update_state_after_alloc(request, a_load(request))
    assert (len(near.loads), len(far.loads)) == (1, 0)


def test_one_that_does_not_know_yet_is_waited_for() -> None:
    """Before those after it are asked; a later one's "not yet" keeps no earlier one from going."""
    near, far, multi = two(match=5)
    request = a_request()
    multi.request_added(request, 1)
    near.match = None
    assert multi.get_num_new_matched_tokens(request, 0) is None
    near.match, far.match = 5, None
    assert multi.get_num_new_matched_tokens(request, 0) is not None


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("hook", ["request_added", "get_num_new_matched_tokens"])
def test_one_that_raises_for_a_request_is_passed_over_for_it_alone(hook: str) -> None:
    """Another one brings its KV; for the next request it has its turn again."""
    near, far, multi = two(match=5)
    near.bad = {hook}
    request, other = a_request(), a_request()
    multi.request_added(request, 1)
    multi.get_num_new_matched_tokens(request, 0)
    near.bad.clear()
    multi.get_num_new_matched_tokens(request, 0)
    multi.update_state_after_alloc(request, a_load(request))
    loading(multi, other)
    assert [load.request for load in far.loads] == [request]
    assert [load.request for load in near.loads] == [other]


@pytest.mark.usefixtures("quiet_log")
def test_a_load_that_cannot_be_begun_has_failed() -> None:
    """It is reported at once, and the next try is another one's."""
    near, far, multi = two(match=5)
    near.bad = {"update_state_after_alloc"}
    request = a_request()
    load = loading(multi, request)
    assert multi.has_pending()
    assert multi.next_wakeup() == 0.0
    (failure,) = multi.take_events().failed
    assert (failure.transfer, failure.num_valid_tokens) == (KEY, load.num_local_tokens)
    assert "'near' raised OSError('bad update_state_after_alloc')" in failure.cause
    assert not multi.has_pending()
    assert multi.next_wakeup() is None
    multi.get_num_new_matched_tokens(request, 4)
    multi.update_state_after_alloc(request, a_load(request, TransferKey(1, 2)))
    assert len(far.loads) == 1


@pytest.mark.usefixtures("quiet_log")
def test_a_load_that_cannot_be_begun_and_is_undone_is_no_news() -> None:
    """Its plan was taken back, so there is nothing to report."""
    near, _, multi = two(match=5)
    near.bad = {"update_state_after_alloc"}
    request = a_request()
    multi.undo_alloc(request, loading(multi, request))
    assert multi.take_events() == ConnectorEvents()


def test_a_synchronous_load_that_cannot_be_begun_raises() -> None:
    """The step would compute on what is not there."""
    near, _, multi = two(match=5, is_async=False)
    near.bad = {"update_state_after_alloc"}
    with pytest.raises(OSError, match="bad update_state_after_alloc"):
        loading(multi, a_request())


def test_after_a_failed_load_the_others_come_first() -> None:
    """And if they have nothing, the one that failed has its second try."""
    near, far, multi = two(match=5)
    request = a_request()
    loading(multi, request)
    failure = LoadFailure(transfer=KEY, num_valid_tokens=0, cause="lost")
    near.said = ConnectorEvents(failed=(failure,))
    assert multi.take_events().failed == (failure,)
    for second, has_far in ((TransferKey(1, 2), True), (TransferKey(1, 3), False)):
        far.match = 5 if has_far else 0
        multi.get_num_new_matched_tokens(request, 4)
        multi.update_state_after_alloc(request, a_load(request, second))
    assert [load.transfer.attempt for load in far.loads] == [2]
    assert [load.transfer.attempt for load in near.loads] == [1, 3]


def test_a_connectors_words_say_whose_they_are() -> None:
    """A parked request is explained by the one that brings its KV."""
    near, _, multi = two(match=5)
    request = a_request()
    assert multi.explain(request) is None
    loading(multi, request)
    assert multi.explain(request) == "its KV from connector 'near'"
    near.explain = lambda request: "a read"  # type: ignore[method-assign]
    assert multi.explain(request) == "a read, by connector 'near'"
