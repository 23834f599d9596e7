"""Shows answers while they grow: a block that redraws itself on a terminal, else plain lines."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

__all__ = ["PlainProgress", "Progress", "TerminalProgress", "make_progress"]

_REDRAW_S = 0.1
_PLAIN_CHARS = 60


class Progress:
    """What the router tells about a run. The base class shows nothing."""

    def note(self, text: str) -> None:
        """Something happened that is not about one request."""

    def begin(self, request_ids: Sequence[str]) -> None:
        """The requests that are about to be sent."""

    def state(self, request_id: str, state: str) -> None:
        """Where a request is."""

    def text(self, request_id: str, text: str) -> None:
        """The whole answer so far."""

    def done(self, request_id: str, text: str, state: str) -> None:
        """The answer is complete."""

    def end(self) -> None:
        """The run is over."""


class PlainProgress(Progress):
    """One line for each event, and for each piece of an answer, marked with its request.

    Each begins with the seconds since this was made.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._start = time.monotonic()
        self._shown: dict[str, int] = {}

    def note(self, text: str) -> None:
        self._line(text)

    def state(self, request_id: str, state: str) -> None:
        self._line(f"{request_id:<10} {state}")

    def text(self, request_id: str, text: str) -> None:
        shown = self._shown.get(request_id, 0)
        if len(text) - shown >= _PLAIN_CHARS:
            cut = text.rfind(" ", shown, len(text)) + 1 or len(text)
            self._piece(request_id, text[shown:cut])
            self._shown[request_id] = cut

    def done(self, request_id: str, text: str, state: str) -> None:
        rest = text[self._shown.get(request_id, 0) :]
        if rest:
            self._piece(request_id, rest)
        self._line(f"{request_id:<10} {state}")

    def _piece(self, request_id: str, piece: str) -> None:
        self._line(f"{request_id:<10} | {_one_line(piece)}")

    def _line(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {text}", file=self._stream, flush=True)


class TerminalProgress(Progress):
    """A line for each request, rewritten in place: its state and the end of its answer. When all
    are answered, the answers in full take the place of the lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lines: dict[str, tuple[str, str]] = {}
        self._num_drawn = 0
        self._drawn_at = 0.0

    def note(self, text: str) -> None:
        self._erase()
        print(f"\x1b[2m{text}\x1b[0m", file=self._stream)
        self._draw()

    def begin(self, request_ids: Sequence[str]) -> None:
        self._lines = dict.fromkeys(request_ids, ("", ""))
        self._draw()

    def state(self, request_id: str, state: str) -> None:
        self._lines[request_id] = (state, self._lines.get(request_id, ("", ""))[1])
        self._redraw()

    def text(self, request_id: str, text: str) -> None:
        self._lines[request_id] = (self._lines.get(request_id, ("", ""))[0], text)
        self._redraw()

    def done(self, request_id: str, text: str, state: str) -> None:
        self._lines[request_id] = (state, text)
        self._redraw()

    def end(self) -> None:
        self._erase()
        for request_id, (_, text) in self._lines.items():
            print(f"\x1b[1m{request_id}\x1b[0m: {text.strip()}\n", file=self._stream)
        self._lines = {}

    def _redraw(self) -> None:
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._erase()
            self._draw()

    def _erase(self) -> None:
        if self._num_drawn:
            self._stream.write(f"\x1b[{self._num_drawn}F\x1b[J")
            self._num_drawn = 0

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        for request_id, (state, text) in self._lines.items():
            head = f"{request_id:<10} {state:<24} "
            room = max(0, width - len(head))
            tail = _one_line(text)[-room:] if room else ""
            self._stream.write(f"\x1b[1m{head[:width]}\x1b[0m{tail}\n")
        self._num_drawn = len(self._lines)
        self._drawn_at = time.monotonic()
        self._stream.flush()


def make_progress(stream: TextIO | None = None) -> Progress:
    """The progress that suits where the output goes."""
    stream = stream or sys.stdout
    return TerminalProgress(stream) if stream.isatty() else PlainProgress(stream)


def _one_line(text: str) -> str:
    return " ".join(text.split())
