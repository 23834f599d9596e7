"""Plans and results cross a process border as packed columns, and arrive as they were."""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcore import wire
from pdcore.messages import (
    ModelRunnerOutput,
    NewRequestData,
    RowError,
    SchedulerOutput,
    TransferKey,
    TransferReport,
)
from pdcore.request import SamplingParams

values = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2**16 + 1)
columns = st.lists(st.lists(values, max_size=5), max_size=4)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
    # A list has no hash, a string has one.
    structured_output=st.none() | st.text(max_size=2) | st.lists(st.integers(), max_size=2),
)


def int32(data: Any) -> np.ndarray:
    return np.array(data, np.int32)


@given(columns)
def test_columns_come_back_as_they_were(data: list[list[int]]) -> None:
    """Any int32 values, in two bytes each exactly when all fit."""
    packed = wire.pack([int32(column) for column in data])
    found = wire.unpack(packed)
    assert [column.tolist() for column in found] == data
    assert all(column.dtype == np.int32 for column in found)
    everything = [value for column in data for value in column]
    width = 2 if all(0 <= value < 2**16 for value in everything) else 4
    assert (packed[1], len(packed[0])) == (width, width * len(everything))


@given(st.data())
def test_a_plan_comes_back_as_it_was(data: st.DataObject) -> None:
    """Every field of a plan and of its new rows, whichever values they have."""
    n = data.draw(st.integers(0, 9), label="rows")
    m = data.draw(st.integers(0, 4), label="blocks")
    column = st.lists(values, min_size=n, max_size=n).map(int32)
    blocks = st.lists(values, min_size=m, max_size=m).map(int32)
    new = st.builds(
        NewRequestData,
        row=st.integers(0, 2**20),
        epoch=st.integers(1, 2**31 - 1),
        uid=st.integers(1, 2**70),
        request_id=st.text(max_size=4),
        token_ids=st.lists(values, max_size=6).map(int32),
        num_prompt_tokens=st.integers(0, 9),
        num_computed_tokens=st.integers(0, 9),
        block_ids=st.lists(values, max_size=3).map(int32),
        sampling=samplings,
        cache_salt=st.none() | st.text(max_size=2),
        lora=st.none() | st.text(max_size=2),
    )
    plan = SchedulerOutput(
        step_id=data.draw(st.integers(0, 2**40)),
        rows=data.draw(column),
        epochs=data.draw(column),
        num_scheduled_tokens=data.draw(column),
        num_computed_tokens=data.draw(column),
        samples=np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_),
        scheduled_new_reqs=tuple(data.draw(st.lists(new, max_size=3))),
        block_rows=data.draw(blocks),
        block_positions=data.draw(blocks),
        block_ids=data.draw(blocks),
        finished_rows=int32(data.draw(st.lists(values, max_size=3))),
        connector_meta=data.draw(st.none() | st.text(max_size=2)),
        num_pool_blocks=data.draw(st.integers(0, 2**40)),
        pool_block_size=data.draw(st.integers(0, 2**20)),
    )
    assert_same(pickle.loads(pickle.dumps(plan)), plan)


@given(st.data(), st.integers(0, 6), st.integers(1, 3))
def test_a_result_comes_back_as_it_was(data: st.DataObject, n: int, width: int) -> None:
    """The padding of speculative steps, -1, included."""
    column = st.lists(values, min_size=n, max_size=n).map(int32)
    tokens = st.lists(values, min_size=n * width, max_size=n * width).map(int32)
    result = ModelRunnerOutput(
        rows=data.draw(column),
        epochs=data.draw(column),
        sampled_token_ids=data.draw(tokens).reshape(n, width),
        errors=(RowError(row=1, epoch=2, cause="odd"),) * data.draw(st.integers(0, 1)),
        transfer_report=TransferReport(finished_recving=(TransferKey(1, 2),)),
    )
    assert_same(pickle.loads(pickle.dumps(result)), result)


@given(samplings)
def test_a_way_of_drawing_comes_back_as_it_was(sampling: SamplingParams) -> None:
    """Only what differs from the defaults is written."""
    data = pickle.dumps(sampling)
    assert pickle.loads(data) == sampling
    assert (b"temperature" in data) == (sampling.temperature != 1.0)


def test_equal_ways_of_drawing_are_written_once() -> None:
    """A thousand new rows that draw alike weigh what their tokens weigh, and little more."""

    def plan(n: int) -> SchedulerOutput:
        new = tuple(
            NewRequestData(
                row=row,
                epoch=1,
                uid=row,
                request_id=str(row),
                token_ids=int32([row]),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=int32([row]),
                sampling=SamplingParams(max_tokens=7, temperature=0.5, seed=3),
            )
            for row in range(n)
        )
        empty = int32([])
        return SchedulerOutput(
            step_id=1,
            rows=empty,
            epochs=empty,
            num_scheduled_tokens=empty,
            num_computed_tokens=empty,
            samples=np.zeros(0, np.bool_),
            scheduled_new_reqs=new,
            block_rows=empty,
            block_positions=empty,
            block_ids=empty,
            finished_rows=empty,
        )

    data = pickle.dumps(plan(1000))
    assert data.count(b"temperature") == 1
    assert len(data) < 40 * 1000
    read = pickle.loads(data).scheduled_new_reqs
    assert {id(new.sampling) for new in read} == {id(read[0].sampling)}


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every field; arrays in values and dtype."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tolist() == expected.tolist()
    elif isinstance(expected, tuple) and not hasattr(expected, "_fields"):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif attrs.has(type(expected)):
        for field in attrs.fields(type(expected)):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


def test_what_a_grammar_is_made_from_may_have_an_equality_of_its_own() -> None:
    """An array, which compares to an array, costs nobody else the plan."""
    sampling = SamplingParams(structured_output=np.arange(3))
    read = pickle.loads(pickle.dumps(sampling))
    assert read.structured_output.tolist() == [0, 1, 2]
