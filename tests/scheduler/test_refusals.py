"""What is refused: parts that do not fit, limits that cannot work, requests that never fit."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import Rig

from grammars import CompilesLater
from pdcore import (
    FCFS,
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector.null import NullConnector, NullSchedulerConnector
from pdcore.errors import ConfigError, DuplicateRequest, InvalidRequest
from pdcore.kvcache import KVCacheSpec, PrefixHasher
from pdcore.scheduler import WaitingView


def test_a_connector_in_place_of_its_half_is_refused() -> None:
    """The error says what to pass."""
    manager = KVCacheManager(LRUBlockPool(8, 4))
    with pytest.raises(ConfigError, match=r"NullConnector was given .* scheduler_side\(\) returns"):
        UnifiedScheduler(manager, connector=NullConnector())  # type: ignore[arg-type]


class Unordered(FCFS):
    """Wants to order the queue anew in every step, but does not say how."""

    dynamic = True


class Unasked(FCFS):
    """Says how to order the queue anew in every step, but not that it wants to."""

    def order(self, waiting: WaitingView, now: float) -> list[int]:
        return list(range(len(waiting.states)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"policy": FCFS}, "policy=<class .*FCFS.*: pass an instance of SchedulingPolicy"),
        ({"limits": Limits}, "limits=<class .*: pass an instance of Limits"),
        ({"kv_manager": LRUBlockPool(8, 4)}, "pass an instance of KVCacheManager"),
        ({"clock": VirtualClock}, "clock=<class .*: pass an instance of Clock"),
        ({"grammar": CompilesLater}, "grammar=<class .*: pass an instance of GrammarBackend"),
        ({"grammar": CompilesLater(vocab_size=0)}, "grammar.vocab_size=0: must be an integer"),
        ({"connector": object()}, "connector=<object .*: pass an instance of SchedulerConnector"),
        ({"policy": Unordered()}, r"Unordered is dynamic, but has no order\(\)"),
        ({"policy": Unasked()}, r"Unasked has an order\(\), which nobody would ask: set dynamic"),
    ],
)
def test_what_is_no_part_is_refused_by_name(parts: dict[str, Any], words: str) -> None:
    """A class in place of an instance, one part in place of another."""
    with pytest.raises(ConfigError, match=words):
        UnifiedScheduler(**{"kv_manager": KVCacheManager(LRUBlockPool(8, 4)), **parts})


def test_a_manager_needs_a_pool_and_a_scheduler_a_request() -> None:
    """Numbers and dictionaries are neither."""
    with pytest.raises(ConfigError, match="pool=64: pass an instance of BlockPool"):
        KVCacheManager(64)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="got a dict: pass a Request"):
        Rig().scheduler.add_request({"request_id": "a"})  # type: ignore[arg-type]


def test_a_hasher_of_another_block_size_is_refused() -> None:
    """Keys for blocks of 32 tokens do not name blocks of 4."""
    with pytest.raises(ConfigError, match="blocks of 32 tokens, the pool's have 4"):
        KVCacheManager(LRUBlockPool(8, 4), hasher=PrefixHasher(32))


@pytest.mark.parametrize(
    ("limits", "prompt", "words"),
    [
        ({"max_model_len": 8}, range(8), "max_model_len is 8"),
        ({"max_model_len": 1000}, range(33), "needs 9 blocks; the pool has 8"),
        ({"enable_chunked_prefill": False}, range(17), "chunked prefill is off"),
        ({"vocab_size": 10}, [3, 10], "token id 10; the vocabulary ends at 9"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    limits: dict[str, Any], prompt: Any, words: str
) -> None:
    """The refusal is one line, and the requests that are there are unharmed."""
    rig = Rig(num_blocks=9, limits=limits)
    rig.add("good", prompt=[1, 2, 3])
    with pytest.raises(InvalidRequest, match=words) as caught:
        rig.add("bad", prompt=prompt)
    assert "\n" not in str(caught.value)
    with pytest.raises(DuplicateRequest, match="good"):
        rig.add("good")
    assert rig.ends() == {"good": FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "max_num_batched_tokens=16"),
        ({"load_timeout_s": 0.0}, "load_timeout_s"),
        ({"on_load_failure": "pray"}, "'pray'"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(limits: dict[str, Any], words: str) -> None:
    """A bound out of range, and two that contradict each other."""
    with pytest.raises(ConfigError, match=words):
        Limits(**limits)


def test_a_connector_with_a_sliding_window_is_refused() -> None:
    """It would hand over blocks that are not there any more."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, sliding_window=8)
    manager = KVCacheManager(LRUBlockPool(9, 4), groups=(spec,))
    with pytest.raises(ConfigError, match="sliding window"):
        UnifiedScheduler(manager, connector=NullSchedulerConnector())


def test_structured_output_without_a_grammar_is_refused() -> None:
    """Constraints are never dropped silently."""
    with pytest.raises(InvalidRequest, match="grammar"):
        Rig().add("r", structured_output="even")
