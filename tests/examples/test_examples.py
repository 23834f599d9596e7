"""The examples that need no model run as they are, without torch, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


def run_example(name: str) -> str:
    """Run an example in a new interpreter that cannot import torch; what it printed."""
    command = [sys.executable, "-W", "error", "-c", RUN_WITHOUT_TORCH, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_engine_step_shows_every_request_to_its_end() -> None:
    """Four requests end; one was preempted, and one found its prefix in the cache."""
    printed = run_example("01_engine_step.py")
    assert printed.count("is done:") == 4
    assert (
        "shared-1 is done: 18 prompt tokens (0 from the cache), 6 output tokens, after it"
        in printed
    )
    assert "19 prompt tokens (16 from the cache)" in printed


def test_own_policy_changes_the_order() -> None:
    """Under the own policy every customer's first request goes before any second one."""
    lines = run_example("02_own_policy.py").splitlines()
    orders = [line.split() for line in lines if "-1" in line]
    assert orders[0] == ["ann-1", "ann-2", "ann-3", "ann-4", "ann-5", "bob-1", "bob-2", "cat-1"]
    assert orders[1][:3] == ["ann-1", "bob-1", "cat-1"]
    assert sorted(orders[1]) == sorted(orders[0])


@pytest.mark.timeout(300)
def test_property_test_catches_the_buggy_pool_only() -> None:
    """The sound pool passes; the buggy one fails, with the calls that show it."""
    printed = run_example("03_property_test_your_pool.py")
    assert "MyPool: ok" in printed
    assert "BuggyPool: BROKEN" in printed
    assert "Failing test case" in printed.partition("BuggyPool: BROKEN")[2]
