"""A worker in this process, whose steps can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loop_engines import BLOCK_SIZE, NUM_BLOCKS

from pdcore import SchedulerOutput
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner


@pytest.fixture
def failing_steps() -> set[int]:
    """Ids of steps that are to fail on the worker."""
    return set()


@pytest.fixture
def runner(failing_steps: set[int]) -> FakeKVRunner:
    def fault(output: SchedulerOutput) -> Exception | None:
        return RuntimeError("the device hiccuped") if output.step_id in failing_steps else None

    return FakeKVRunner(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, step_fault=fault)


@pytest.fixture
def executor(runner: FakeKVRunner) -> Iterator[InProcessExecutor]:
    executor = InProcessExecutor(lambda: runner, num_blocks=NUM_BLOCKS)
    executor.start()
    yield executor
    executor.close()
