"""The table at the end of the demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd.router import Answer
from pdcore.trace import Trace

__all__ = ["COLUMNS", "summary", "table"]

_Column = tuple[str, Callable[[Answer], str]]

COLUMNS = """\
KV wait      the decode process kept the request parked so long, its blocks in hand, until its KV
             had come and the prefill process had vouched for it
KV moved     what was read of the prefill process, and GB/s how fast the bytes came
prefix       tokens that a process had from earlier prompts"""
"""What the columns of `table` mean."""


def table(answers: Sequence[Answer], decode_trace: Trace | None) -> str:
    """One line a request: tokens, times, and what the KV transfer did."""
    waits = _kv_waits(decode_trace)
    columns: list[_Column] = [
        ("request", lambda a: a.request_id),
        ("prompt", lambda a: str(len(a.prompt_token_ids))),
        ("output", lambda a: str(len(a.token_ids))),
        ("first token", lambda a: _seconds(a.first_token_at, a.sent_at)),
        ("KV wait", lambda a: _milliseconds(waits.get(a.request_id))),
        ("KV moved", _moved),
        ("GB/s", _rate),
        ("prefix on P", lambda a: str(a.num_local_prefill_tokens)),
        ("prefix on D", lambda a: str(a.num_local_decode_tokens)),
        ("ended", lambda a: a.finish_reason),
    ]
    rows = [[name for name, _ in columns]]
    rows += [[cell(answer) for _, cell in columns] for answer in answers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def summary(answers: Sequence[Answer]) -> str:
    """What the run as a whole did, in one line."""
    moved = [answer for answer in answers if answer.num_moved_bytes]
    num_bytes = sum(answer.num_moved_bytes for answer in moved)
    start = min(answer.sent_at for answer in answers if answer.sent_at is not None)
    end = max(answer.ended_at for answer in answers if answer.ended_at is not None)
    return (
        f"{len(answers)} answers, {sum(len(a.token_ids) for a in answers)} tokens in "
        f"{end - start:.1f} s; {num_bytes / 1e6:.0f} MB of KV moved for {len(moved)} of them, "
        f"{len(answers) - len(moved)} prompts computed by the decode process"
    )


def _kv_waits(trace: Trace | None) -> dict[str, float]:
    waits: dict[str, float] = {}
    for state in trace.states if trace is not None else ():
        if state.state == "WAITING_FOR_REMOTE_KVS":
            waits[state.request_id] = waits.get(state.request_id, 0.0) + state.duration_s
    return waits


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def _seconds(end: float | None, start: float | None) -> str:
    return "-" if end is None or start is None else f"{end - start:.2f} s"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _moved(answer: Answer) -> str:
    return f"{answer.num_moved_bytes / 1e6:.1f} MB" if answer.num_moved_bytes else "-"


def _rate(answer: Answer) -> str:
    return f"{answer.num_moved_bytes / answer.move_s / 1e9:.2f}" if answer.move_s else "-"
