"""The parts of the prefill/decode example that can be tested without a model."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcore.clock import VirtualClock
from pdcore.trace import Trace, Tracer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name == "pd" or name.startswith("pd.")]:
        del sys.modules[name]


def answers(*token_ids: list[int]) -> list[object]:
    """Answers with these tokens, named a, b, ..."""
    from pd.prompts import Chat
    from pd.router import Answer

    return [
        Answer(chat=Chat(request_id=name, messages=()), token_ids=tokens)
        for name, tokens in zip("abc", token_ids, strict=False)
    ]


class TestShortcomings:
    """`pd.check.shortcomings`"""

    def made(self, **changes: object) -> object:
        """An answer without a fault, but for these changes."""
        (answer,) = answers([1, 2])
        for name, value in {"finish_reason": "stop", "num_moved_bytes": 9, **changes}.items():
            setattr(answer, name, value)
        return answer

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"finish_reason": "error", "cause": "no KV"}, "no KV"),
            ({"finish_reason": ""}, "never ended"),
            ({"token_ids": []}, "no answer"),
            ({"num_moved_bytes": 0}, "without any KV"),
        ],
    )
    def test_a_run_that_proves_nothing_is_found(
        self, changes: dict[str, object], words: str
    ) -> None:
        """A missing answer, and one that was computed without the prefill process."""
        from pd.check import shortcomings

        assert shortcomings([self.made()], needs_transfer=True) == []
        found = shortcomings([self.made(), self.made(**changes)], needs_transfer=True)
        assert len(found) == 1
        assert words in found[0]


class TestCompare:
    """`pd.check.compare`"""

    def test_equal_answers_have_no_difference(self) -> None:
        """Nothing is found where nothing differs."""
        from pd.check import compare

        assert compare(answers([1, 2]), answers([1, 2]), {}, dtype="float32") == []

    @pytest.mark.parametrize(
        ("token_ids", "position"), [([1, 9, 3], 1), ([1], 1), ([1, 2, 3, 4], 3)]
    )
    def test_any_difference_is_found(self, token_ids: list[int], position: int) -> None:
        """Another token, a missing one and one too many all count."""
        from pd.check import compare

        (found,) = compare(answers(token_ids), answers([1, 2, 3]), {}, dtype="float32")
        assert found.position == position
        assert not found.is_excused

    @pytest.mark.parametrize(
        ("dtype", "near", "is_excused"),
        [
            ("bfloat16", {2: 0.0, 9: 0.01}, True),
            ("bfloat16", {9: 0.0, 2: 0.0}, True),
            ("bfloat16", {2: 0.0, 9: 3.0}, False),
            ("bfloat16", {2: 0.0, 8: 0.01}, False),
            ("float32", {2: 0.0, 9: 0.0}, False),
        ],
    )
    def test_only_a_near_tie_in_low_precision_is_excused(
        self, dtype: str, near: dict[int, float], is_excused: bool
    ) -> None:
        """The other token must have been about as likely; in float32 nothing is excused."""
        from pd.check import compare

        candidates = {"a": [{1: 0.0}, near]}
        (found,) = compare(answers([1, 9]), answers([1, 2]), candidates, dtype=dtype)
        assert found.is_excused is is_excused


class TestPlainProgress:
    """`pd.progress.PlainProgress`"""

    def test_pieces_make_up_the_whole_answer(self) -> None:
        """What is printed in pieces is the answer, cut at spaces."""
        from pd.progress import PlainProgress

        stream = io.StringIO()
        progress = PlainProgress(stream)
        sentence = "the quick brown fox jumps over the lazy dog, and then some more words follow it"
        words = sentence.split()
        for count in range(1, len(words) + 1):
            progress.text("r", " ".join(words[:count]))
        progress.done("r", " ".join(words), "done (stop)")
        pieces = [line.split("| ", 1)[1] for line in stream.getvalue().splitlines() if "|" in line]
        assert len(pieces) > 1
        assert " ".join(pieces).split() == words


class TestTerminalProgress:
    """`pd.progress.TerminalProgress`"""

    def test_lines_fit_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No drawn line is wider than the terminal, so that redrawing erases all of it."""
        from pd.progress import TerminalProgress

        monkeypatch.setenv("COLUMNS", "60")
        stream = io.StringIO()
        progress = TerminalProgress(stream)
        progress.begin(["r"])
        progress.state("r", "answering")
        progress._drawn_at = 0.0
        progress.text("r", "word " * 100)
        drawn = stream.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert max(map(len, drawn.splitlines())) < 60 + len("\x1b[1F\x1b[J")
        assert "word" in drawn


def traces() -> list[Trace]:
    """A prefill process that hands over, and a decode process that loads while it decodes."""
    clock = VirtualClock()
    lanes = ("engine", "worker", "device", "kv transfer")
    prefill, decode = (Tracer(name, lanes=lanes, clock=clock) for name in ("prefill", "decode"))
    prefill.state("r", "RUNNING")
    prefill.add_span("device", "prefill 100", 0.0, 1.0)
    clock.advance(1.0)
    prefill.state("r", None)
    decode.state("r", "WAITING_FOR_REMOTE_KVS")
    decode.add_span("device", "decode 2", 1.0, 1.1)
    decode.add_span("kv transfer", "read r", 1.0, 1.2)
    clock.advance(0.2)
    decode.state("r", "RUNNING")
    clock.advance(1.0)
    return [prefill.snapshot(), decode.snapshot()]


class TestTimeline:
    """`pd.timeline.draw_timeline`"""

    def test_draws_a_png(self, tmp_path: Path) -> None:
        """Two traces become a picture."""
        pytest.importorskip("matplotlib")
        from pd.timeline import draw_timeline

        draw_timeline(tmp_path / "t.png", traces(), title="test")
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")

    def test_close_up_shows_the_load_beside_decode_steps(self) -> None:
        """The close-up is around a load during which others decoded; without one there is none."""
        pytest.importorskip("matplotlib")
        from pd.timeline import _close_up

        prefill, decode = traces()
        window = _close_up(decode, 0.0)
        assert window is not None
        assert window[0] < 1.0 < 1.2 < window[1]
        assert _close_up(prefill, 0.0) is None


class TestTable:
    """`pd.report.table`"""

    def test_lines_are_equally_wide(self) -> None:
        """Every row of the table is as wide as its head."""
        from pd.report import table

        lines = table(answers([1, 2], []), traces()[1]).splitlines()
        assert len(lines) == 4
        assert len({len(line) for line in lines}) == 1


def test_an_interrupt_while_an_engine_starts_comes_through_afterwards() -> None:
    """Also when another thread gets the signal: the start is whole, and then Ctrl-C counts."""
    from pd.processes import _interrupts_held_back

    started = []

    def start() -> None:
        with _interrupts_held_back():
            waiting = threading.Thread(target=time.sleep, args=(0.5,))
            waiting.start()
            os.kill(os.getpid(), signal.SIGINT)
            waiting.join()
            started.append(True)

    # Whoever starts the tests may ignore the signal, and then it would never come.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert started == [True]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
