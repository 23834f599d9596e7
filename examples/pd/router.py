"""The router: sends each prompt to the prefill engine, and what comes of it to decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import attrs

from pd.chat_model import ChatTokenizer
from pd.messages import (
    Bye,
    Candidates,
    EngineFailed,
    EngineReady,
    Moved,
    NewTokens,
    Recorded,
    RequestDone,
    Submit,
)
from pd.processes import EngineProcess
from pd.progress import Progress
from pd.prompts import Chat
from pdcore.trace import Trace

__all__ = ["Answer", "DemoError", "Router"]

_WANT_HAND_OVER = {"do_remote_decode": True}
_LATE_AFTER_TOKENS = 8
_KILL_AFTER_HAND_OVERS = 3


class DemoError(Exception):
    """Raised when the run cannot be completed. The message is for the user."""


@attrs.define(eq=False)
class Answer:
    """What became of one chat. Times are seconds on the machine's monotonic clock.

    Args:
        chat: the question.
        prompt_token_ids: the question as the engines got it.
        token_ids: the answer so far.
        sent_at, first_token_at, ended_at: when.
        finish_reason, cause: why it ended.
        num_local_prefill_tokens, num_local_decode_tokens: prefix found in either engine's cache.
        num_moved_tokens, num_moved_bytes, move_s: what NIXL read, and how long reading took.
    """

    chat: Chat
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = attrs.field(factory=list)
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    finish_reason: str = ""
    cause: str | None = None
    num_local_prefill_tokens: int = 0
    num_local_decode_tokens: int = 0
    num_moved_tokens: int = 0
    num_moved_bytes: int = 0
    move_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.chat.request_id


class Router:
    """Runs a set of chats through one or two engine processes.

    Args:
        decode: the engine that answers.
        prefill: the engine that computes prompts; None makes ``decode`` do both.
        tokenizer: the model's.
        progress: is told what happens; None shows nothing.
        max_tokens: the longest answer.
        deadline: when to give up, in seconds on the monotonic clock.
        kill_prefill: end the prefill process in the middle, and go on without it.
    """

    def __init__(
        self,
        *,
        decode: EngineProcess,
        prefill: EngineProcess | None = None,
        tokenizer: ChatTokenizer,
        progress: Progress | None = None,
        max_tokens: int,
        deadline: float,
        kill_prefill: bool = False,
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._tokenizer = tokenizer
        self._progress = progress or Progress()
        self._max_tokens = max_tokens
        self._deadline = deadline
        self._kill_prefill = kill_prefill
        self._engines = [engine for engine in (prefill, decode) if engine is not None]
        self._answers: dict[str, Answer] = {}
        self._late: list[Answer] = []
        self._at_prefill: dict[str, None] = {}
        self._num_hand_overs = 0
        self.ready: dict[str, EngineReady] = {}
        self.traces: dict[str, Trace] = {}
        self.candidates: dict[str, tuple[dict[int, float], ...]] = {}

    def run(self, chats: Sequence[Chat]) -> list[Answer]:
        """Answer every chat and return the answers in the order of the chats.

        Raises:
            DemoError: an engine failed in a way that leaves chats without an answer, or time is up.
        """
        answers = [
            Answer(chat=chat, prompt_token_ids=tuple(self._tokenizer.encode(chat)))
            for chat in chats
        ]
        self._wait_until_ready()
        self._progress.begin([chat.request_id for chat in chats])
        self._answers = {answer.request_id: answer for answer in answers}
        self._late = [answer for answer in answers if answer.chat.is_late]
        for answer in answers:
            if not answer.chat.is_late:
                self._send(answer)
        while any(answer.ended_at is None for answer in answers):
            self._serve()
        self._collect_traces()
        self._progress.end()
        return answers

    def _wait_until_ready(self) -> None:
        while len(self.ready) < len(self._engines):
            self._serve()

    def _serve(self) -> None:
        """Take in what the engines say, waiting for it if need be."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            names = ", ".join(self._unanswered())
            raise DemoError(
                f"time is up; unanswered: {names}. A slow or busy machine needs more: "
                "make demo ARGS='--deadline 900'"
            )
        connections = [engine.connection for engine in self._engines]
        ready = wait(connections, timeout=min(remaining, 1.0))
        for engine in tuple(self._engines):
            if engine.connection in ready:
                try:
                    for message in engine.receive():
                        self._take(message)
                except EOFError:
                    self._lost(engine)

    def _unanswered(self) -> list[str]:
        waiting = [a.request_id for a in self._answers.values() if a.ended_at is None]
        return waiting or [f"the {engine.role} engine" for engine in self._engines]

    def _take(self, message: object) -> None:
        match message:
            case EngineReady():
                self.ready[message.role] = message
                self._progress.note(f"{message.role} engine ready, {message.num_blocks} KV blocks")
            case EngineFailed():
                raise DemoError(f"the {message.role} engine failed: {message.cause}")
            case Recorded():
                self.traces[message.role] = message.trace
            case Candidates():
                self.candidates[message.request_id] = message.candidates
            case Moved():
                answer = self._answers[message.request_id]
                answer.num_moved_bytes += message.num_bytes
                answer.move_s += message.seconds
            case NewTokens() if message.role != "prefill":
                self._take_tokens(message)
            case RequestDone() if message.role == "prefill":
                self._hand_over(message)
            case RequestDone():
                self._finish(message)

    def _send(self, answer: Answer) -> None:
        answer.sent_at = time.monotonic()
        if self._prefill is None:
            self._submit(self._decode, answer, max_tokens=self._max_tokens)
            return
        self._at_prefill[answer.request_id] = None
        self._progress.state(answer.request_id, "at prefill")
        self._submit(self._prefill, answer, max_tokens=1, params=_WANT_HAND_OVER)

    def _submit(
        self,
        engine: EngineProcess,
        answer: Answer,
        *,
        max_tokens: int,
        params: dict[str, Any] | None = None,
    ) -> None:
        # A dead engine is noticed when its connection is read, which also takes care of this.
        engine.send(
            Submit(
                request_id=answer.request_id,
                prompt_token_ids=answer.prompt_token_ids,
                max_tokens=max_tokens,
                eos_token_id=self._tokenizer.eos_token_id,
                kv_transfer_params=params,
            )
        )

    def _hand_over(self, done: RequestDone) -> None:
        """The prompt is computed: pass what the prefill engine says about its KV on to decode."""
        answer = self._answers[done.request_id]
        self._at_prefill.pop(done.request_id, None)
        answer.num_local_prefill_tokens = done.num_cached_tokens
        if done.kv_transfer_params is None:
            why = done.cause or done.finish_reason
            self._progress.state(done.request_id, f"no KV to fetch: {why}")
        else:
            self._progress.state(done.request_id, "KV on offer")
        self._submit(
            self._decode, answer, max_tokens=self._max_tokens, params=done.kv_transfer_params
        )
        self._num_hand_overs += 1
        if self._kill_prefill and self._num_hand_overs == _KILL_AFTER_HAND_OVERS and self._prefill:
            self._progress.note(f"killing the prefill process (pid {self._prefill.pid})")
            self._prefill.kill()

    def _take_tokens(self, message: NewTokens) -> None:
        answer = self._answers[message.request_id]
        if answer.first_token_at is None:
            answer.first_token_at = message.time
            self._progress.state(answer.request_id, "answering")
        answer.token_ids.extend(message.token_ids)
        self._progress.text(answer.request_id, self._tokenizer.decode(answer.token_ids))
        if len(answer.token_ids) >= _LATE_AFTER_TOKENS:
            late, self._late = self._late, []
            for answer in late:
                self._send(answer)

    def _finish(self, done: RequestDone) -> None:
        answer = self._answers[done.request_id]
        answer.ended_at = done.time
        answer.finish_reason, answer.cause = done.finish_reason, done.cause
        answer.num_local_decode_tokens = done.num_cached_tokens
        answer.num_moved_tokens = done.num_external_tokens
        text = self._tokenizer.decode(answer.token_ids)
        self._progress.done(answer.request_id, text, f"done ({done.finish_reason})")

    def _lost(self, engine: EngineProcess) -> None:
        """An engine's process is gone. Without the prefill engine, decode computes the prompts."""
        self._engines.remove(engine)
        if engine is not self._prefill:
            raise DemoError(f"the {engine.role} process died (exit code {engine.exit_code})")
        self._prefill = None
        if not self._answers:
            raise DemoError(f"the prefill process died before it was ready ({engine.exit_code})")
        self._progress.note("the prefill process is gone; the decode engine does its work as well")
        for request_id in self._at_prefill:
            self._progress.state(request_id, "sent to decode")
            self._submit(self._decode, self._answers[request_id], max_tokens=self._max_tokens)
        self._at_prefill.clear()

    def _collect_traces(self) -> None:
        """Let the engines end. Each sends its trace last, and then its pipe closes."""
        for engine in self._engines:
            engine.send(Bye())
        for engine in self._engines:
            try:
                while engine.connection.poll(max(0.0, self._deadline - time.monotonic())):
                    for message in engine.receive():
                        self._take(message)
            except EOFError:
                continue
