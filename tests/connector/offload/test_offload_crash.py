"""Engines that are killed while their disk is being written, and those that come after them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("nixl")

from offload_engine import PROMPTS, OffloadEngine

pytestmark = pytest.mark.nixl

PROGRAM = Path(__file__).with_name("offload_engine.py")


def _kill_one(directory: Path, random: Random) -> None:
    """Start an engine, let it serve some prompts, and kill it at any moment after."""
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        for _ in range(random.randint(1, 2 * len(PROMPTS))):
            assert process.stdout.readline() == "served\n"
    finally:
        process.kill()
        process.communicate()


def test_what_killed_engines_leave_on_disk_is_right_or_not_found(tmp_path: Path) -> None:
    """Two engines die, writing; the next gets right tokens, many of them with KV of the dead."""
    random = Random(5)
    alone = OffloadEngine(None)
    expected = [alone.serve(prompt) for prompt in PROMPTS]
    for _ in range(2):
        _kill_one(tmp_path, random)
    after = OffloadEngine(tmp_path)
    assert [after.serve(prompt) for prompt in PROMPTS] == expected
    assert after.scheduler.stats().connector.offload.num_loaded_from_disk > 0
    after.close()
