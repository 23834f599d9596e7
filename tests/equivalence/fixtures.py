"""The recorded traces on disk.

One compressed file: each line holds a trace in full, a digest of its tokens, and what vLLM decided.
Nothing is made anew from a seed when it is read, so the meaning of a record cannot change silently.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

from scheduler_traces import Trace
from stepping import Record

__all__ = ["RECORDED", "REGRESSIONS", "read", "write"]

_FOLDER = Path(__file__).parent / "recorded"
RECORDED = _FOLDER / "vllm-0.32.jsonl.xz"
REGRESSIONS = _FOLDER / "regressions.jsonl"


def read(path: Path) -> Iterator[tuple[Trace, Record]]:
    """The traces of a file with their records. Raises `ValueError` where tokens changed."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    for line in text.decode().splitlines():
        data = json.loads(line)
        trace = Trace.from_data(data["trace"])
        if trace.tokens_digest() != data["tokens"]:
            raise ValueError(f"the tokens of trace {trace.name} are not those it was recorded with")
        yield trace, Record.from_data(data["record"])


def write(path: Path, entries: Iterable[tuple[Trace, Record]]) -> None:
    """Replace a file of traces. Equal traces and records give equal bytes."""
    lines = [
        json.dumps(
            {
                "trace": trace.to_data(),
                "tokens": trace.tokens_digest(),
                "record": record.to_data(),
            },
            separators=(",", ":"),
        )
        for trace, record in entries
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(data, preset=9) if path.suffix == ".xz" else data)
