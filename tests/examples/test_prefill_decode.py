"""The prefill/decode example runs for real, proves its answers, and survives what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, str(ROOT / "examples" / "04_prefill_decode.py")]
NUM_CHATS = 10
# A busy machine is slow, and the demo's own deadline is for a quiet one.
DEADLINE_S = 420


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        [*DEMO, *options], capture_output=True, text=True, timeout=DEADLINE_S + 60
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What one run of the demo printed, and where its files are."""
    out = tmp_path_factory.mktemp("demo")
    done = run_demo("--max-tokens", "16", "--deadline", str(DEADLINE_S), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


@pytest.mark.model
@pytest.mark.nixl
@pytest.mark.timeout(600)
class TestRun:
    """One run, looked at from several sides."""

    def test_every_answer_is_that_of_one_engine(self, finished: tuple[str, Path]) -> None:
        """The self-check compared every answer and found no difference."""
        printed, _ = finished
        assert f"self-check: {NUM_CHATS} of {NUM_CHATS} answers equal, token for token" in printed

    def test_table_accounts_for_every_chat(self, finished: tuple[str, Path]) -> None:
        """Every chat's KV was moved, and the shared prefix was found on both sides."""
        printed, _ = finished
        ended = [line for line in printed.splitlines() if line.endswith((" length", " stop"))]
        rows = {line.split()[0]: line for line in ended}
        assert len(rows) == NUM_CHATS
        assert all(" MB " in row for row in rows.values())
        on_prefill, on_decode = re.findall(r"(\d+)\s+(\d+)\s+\w+$", rows["library-2"])[0]
        assert int(on_prefill) > 200
        assert int(on_decode) > 200

    def test_answers_are_streamed_as_text(self, finished: tuple[str, Path]) -> None:
        """Pieces of different answers come in turns, before the first answer is complete."""
        printed, _ = finished
        pieces = [line.split()[2] for line in printed.splitlines() if " | " in line]
        assert len(set(pieces)) == NUM_CHATS

    def test_decode_goes_on_while_kv_is_on_the_way(self, finished: tuple[str, Path]) -> None:
        """In the trace, the decode process computes while some request waits for its KV."""
        _, out = finished
        events = json.loads((out / "trace.json").read_text())["traceEvents"]
        steps = list(decode_steps(events))
        waits = list(kv_waits(events))
        assert len(waits) >= NUM_CHATS
        assert any(
            start < wait_end and wait_start < end
            for wait_start, wait_end in waits
            for start, end in steps
        )

    def test_picture_is_drawn(self, finished: tuple[str, Path]) -> None:
        """The timeline is a PNG of some substance."""
        _, out = finished
        picture = (out / "timeline.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 30_000


def decode_steps(events: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """The times of the decode process's forward passes, in microseconds."""
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    for event in events:
        is_step = event["ph"] == "X" and event["name"].startswith("decode")
        if is_step and lanes[event["pid"], event["tid"]] == "device":
            yield event["ts"], event["ts"] + event["dur"]


def kv_waits(events: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """The times during which a request waited for remote KV, in microseconds."""
    waits = [event for event in events if event["name"] == "WAITING_FOR_REMOTE_KVS"]
    begins = [event for event in waits if event["ph"] == "b"]
    ends = [event for event in waits if event["ph"] == "e"]
    for begin, end in zip(begins, ends, strict=True):
        yield begin["ts"], end["ts"]


@pytest.mark.model
@pytest.mark.nixl
@pytest.mark.timeout(600)
def test_death_of_the_prefill_process_costs_no_answer(tmp_path: Path) -> None:
    """With the prefill process killed in the middle, decode answers everything, and rightly."""
    options = ["--kill-prefill", "--max-tokens", "16", "--deadline", str(DEADLINE_S)]
    done = run_demo(*options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killing the prefill process" in done.stdout
    assert "the prefill process is gone" in done.stdout
    assert f"{NUM_CHATS} of {NUM_CHATS} answers equal" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], "/no/such/model does not exist"),
        (["--max-tokens", "0"], "must be at least 1"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_user_error_is_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    """A wrong option gives a non-zero exit and a sentence, not a traceback."""
    done = run_demo(*options, "--out", str(tmp_path))
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    """An empty folder is refused before any process is started."""
    done = run_demo("--model", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} has no config.json: it is not a Hugging Face model folder\n"
    )


@pytest.mark.timeout(300)
def test_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    """A checkpoint that is none ends the run with its reason, and no traceback."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    done = run_demo("--model", str(tmp_path / "broken.gguf"), "--out", str(tmp_path))
    assert done.returncode == 2
    assert "broken.gguf" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.model
@pytest.mark.timeout(300)
def test_interrupt_ends_all_processes(tmp_path: Path) -> None:
    """Ctrl-C ends the demo soon, with one line, and both engines with it."""
    demo = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith("model ")
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert errors == "interrupted\n"
    deadline = time.monotonic() + 30
    while group_exists(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_exists(demo.pid)


def group_exists(group: int) -> bool:
    """Whether anybody is left in a process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
