"""vLLM in an interpreter of its own, asked for one record after the other."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType

from scheduler_traces import Trace
from stepping import Record

__all__ = ["PeerProcess"]

_SERVER = Path(__file__).with_name("peer_engine.py")
# Without the first three every start waits for a network that may not be there.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class PeerProcess:
    """Starts the recorder, waits until it is ready, and ends it with the ``with`` block.

    Args:
        python: an interpreter that has vLLM.
    """

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )

        self._answer()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def record(self, trace: Trace) -> Record:
        """What vLLM decides over a trace. Raises `RuntimeError` with what it raised, if it did."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{trace}\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        if "error" in answer:
            raise RuntimeError(f"vLLM failed on {trace}:\n{answer['error']}")
        return Record.from_data(answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the recorder ended with status {self._process.wait()}")
        return line
