"""One engine in a process of its own: the loop, and the pipe to the router."""

from __future__ import annotations

import os
import queue
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from pd.messages import (
    Bye,
    Candidates,
    EngineFailed,
    EngineReady,
    EngineSettings,
    Moved,
    NewTokens,
    Recorded,
    RequestDone,
    Submit,
)
from pdcore.errors import PdcoreError, RequestError, TransferError
from pdcore.loop import BatchQueue, Waker, wait
from pdcore.messages import RequestOutput
from pdcore.request import Request, SamplingParams
from pdcore.trace import Tracer

__all__ = ["Engine", "run_engine"]


def run_engine(settings: EngineSettings, connection: Connection) -> None:
    """Build an engine and serve the router until it says goodbye or is gone."""
    # Failed transfers are reported by the engine; NIXL need not print them as well.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        engine = Engine(settings, connection)
        try:
            engine.serve()
        finally:
            engine.close()
    except (PdcoreError, MemoryError) as error:
        _send(connection, EngineFailed(role=settings.role, cause=str(error) or repr(error)))
    finally:
        connection.close()


class Engine:
    """Serves requests from a pipe.

    Args:
        settings: what to build.
        connection: the pipe to the router.
    """

    def __init__(self, settings: EngineSettings, connection: Connection) -> None:
        # Imported here: this brings torch, and the router, which imports this file, needs none.
        from pd.assembly import assemble

        self._role = settings.role
        self._connection = connection
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waker = Waker()
        self._tracer = Tracer(settings.role, lanes=("engine", "worker", "device", "kv transfer"))
        self._parts = assemble(settings, self._tracer, self._waker)
        self._batches = BatchQueue(
            self._parts.scheduler, self._parts.executor, depth=settings.depth
        )
        self._names: dict[int, str] = {}
        self._is_leaving = False
        threading.Thread(target=self._listen, name="pd-listen", daemon=True).start()
        self._say(
            EngineReady(
                role=self._role,
                dtype=self._parts.dtype,
                num_blocks=self._parts.num_blocks,
                bytes_per_block=self._parts.bytes_per_block,
            )
        )

    def serve(self) -> None:
        """The loop: take what the router sent, run a step, tell what came of it."""
        scheduler = self._parts.scheduler
        while True:
            self._take_commands()
            if self._is_leaving:
                break
            wait(scheduler, self._waker, clock=scheduler.clock)
            if not (scheduler.has_requests() or scheduler.has_work()):
                continue
            result = self._batches.step()
            self._tell_moves()
            for output in result.outputs:
                self._tell(output)
        self._say(Recorded(role=self._role, trace=self._tracer.snapshot()))

    def close(self) -> None:
        """Stop every thread and free the model."""
        try:
            self._batches.abandon()
        finally:
            self._parts.close()

    def _listen(self) -> None:
        """On a thread of its own: pass on what the router sends, and wake the loop."""
        try:
            while True:
                self._commands.put(self._connection.recv())
                self._waker()
        except (EOFError, OSError):
            self._commands.put(Bye())  # the router is gone, and so is the reason to be here
            self._waker()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            match self._commands.get():
                case Submit() as submit:
                    self._add(submit)
                case Bye():
                    self._is_leaving = True

    def _add(self, submit: Submit) -> None:
        try:
            request = Request(
                submit.request_id,
                submit.prompt_token_ids,
                sampling=SamplingParams(max_tokens=submit.max_tokens, temperature=0.0),
                eos_token_id=submit.eos_token_id,
                kv_transfer_params=submit.kv_transfer_params,
            )
            handle = self._parts.scheduler.add_request(request)
        except (RequestError, TransferError) as error:
            self._tell_refused(submit.request_id, str(error))
        else:
            self._names[handle.uid] = submit.request_id

    def _tell_refused(self, request_id: str, cause: str) -> None:
        output = RequestOutput(request_id=request_id, cause=cause)
        self._say(self._done(output, finish_reason="refused"))

    def _tell(self, output: RequestOutput) -> None:
        if output.new_token_ids:
            self._say(
                NewTokens(
                    role=self._role,
                    request_id=output.request_id,
                    token_ids=output.new_token_ids,
                    time=time.monotonic(),
                )
            )
        if output.finish_reason is not None:
            places = self._parts.runner.candidates.pop(output.request_id, [])
            if places:
                self._say(Candidates(request_id=output.request_id, candidates=tuple(places)))
            # The trace goes out again and again, so that most of it survives a kill.
            self._say(Recorded(role=self._role, trace=self._tracer.snapshot()))
            self._say(self._done(output, finish_reason=str(output.finish_reason)))

    def _done(self, output: RequestOutput, *, finish_reason: str) -> RequestDone:
        return RequestDone(
            role=self._role,
            request_id=output.request_id,
            finish_reason=finish_reason,
            cause=output.cause,
            kv_transfer_params=output.kv_transfer_params,
            num_cached_tokens=output.num_cached_tokens,
            num_external_tokens=output.num_external_tokens,
            time=time.monotonic(),
        )

    def _tell_moves(self) -> None:
        """Pass on what the connector measured, and put it on the timeline."""
        while self._parts.runner.moved:
            move = self._parts.runner.moved.pop(0)
            request_id = self._names.get(move.transfer.uid, "?")
            self._tracer.add_span(
                "kv transfer",
                f"read {request_id}",
                move.started_at,
                move.ended_at,
                num_bytes=move.num_bytes,
                num_descriptors=move.num_descriptors,
            )
            self._say(Moved(request_id=request_id, num_bytes=move.num_bytes, seconds=move.wire_s))

    def _say(self, message: Any) -> None:
        _send(self._connection, message)


def _send(connection: Connection, message: Any) -> None:
    """Send, unless the router is gone: `_listen` notices that and ends the loop."""
    try:
        connection.send(message)
    except (BrokenPipeError, OSError):
        return
