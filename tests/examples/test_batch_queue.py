"""The batch queue example shows the gain, draws it, and proves that no token depends on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = (
    "import runpy, sys; sys.modules['torch'] = None; "
    f"sys.path.insert(0, {str(EXAMPLES)!r}); "
    f"runpy.run_path({str(EXAMPLES / '05_batch_queue.py')!r}, run_name='__main__')"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run printed, and where its picture is. Without torch, and with long steps, so that a
    busy machine changes little."""
    out = tmp_path_factory.mktemp("rhythm")
    options = ["--device-ms", "30", "--app-ms", "30", "--max-tokens", "20", "--out", str(out)]
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout, out


def test_two_plans_under_way_hide_the_application_behind_the_device(
    finished: tuple[str, Path],
) -> None:
    """With both as slow, one step at a time leaves the device idle for half of the time."""
    pattern = r"^(step\(\)|BatchQueue, depth \d) +([\d.]+) +[\d.]+ +(\d+)%$"
    rows = re.findall(pattern, finished[0], re.MULTILINE)
    assert [name for name, _, _ in rows] == [
        "step()",
        "BatchQueue, depth 2",
        "BatchQueue, depth 3",
    ]
    alone, queued = rows[:2]
    assert float(queued[1]) > 1.4 * float(alone[1])
    assert int(alone[2]) >= 40
    assert int(queued[2]) <= 35
    assert "the tokens are the same" in finished[0]


def test_the_rhythm_is_drawn(finished: tuple[str, Path]) -> None:
    """A PNG of some substance."""
    picture = (finished[1] / "rhythm.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
