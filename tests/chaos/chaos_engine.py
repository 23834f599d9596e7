"""One engine, in its own process: the parts, the loop, and the pipe to the router."""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from chaos_messages import (
    MAX_MODEL_LEN,
    Abort,
    Bye,
    CallOff,
    EngineSettings,
    ExpectPush,
    Explain,
    Explanation,
    Failed,
    Leave,
    Progress,
    Ready,
    Settle,
    Settled,
    Submit,
    Told,
)
from chaos_runner import MisreadingRunner
from engine_counts import EngineCounts
from protections import switched_off
from pushed_loads import PushedLoads
from wire_faults import WireFaults

from pdcore.clock import MonotonicClock
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.errors import ExecutorDead, ExecutorError, InvariantBroken, RequestError, TransferError
from pdcore.kvcache.manager import KVCacheManager
from pdcore.kvcache.pool import LRUBlockPool
from pdcore.loop import BatchQueue, Waker, wait
from pdcore.messages import RequestOutput
from pdcore.request import Request, SamplingParams
from pdcore.runner.executor.inprocess import InProcessExecutor
from pdcore.scheduler.base import Limits
from pdcore.scheduler.unified import UnifiedScheduler

__all__ = ["run_engine"]

_KEY = b"a key that all engines of the run share"
_BYTES_PER_TOKEN = 8


def run_engine(settings: EngineSettings, connection: Connection) -> None:
    """Main function of the process: build an engine and serve the router."""
    try:
        with switched_off(settings) as changed:
            engine = _Engine(changed, connection)
            try:
                engine.serve()
            finally:
                engine.close()
    except BaseException:
        _send(connection, Failed(traceback.format_exc(limit=-6)))
        raise
    finally:
        connection.close()


class _Engine:
    def __init__(self, settings: EngineSettings, connection: Connection) -> None:
        self._connection = connection
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waker = Waker()
        self._clock = MonotonicClock()
        self._faults = WireFaults()
        self._faults.install()
        self._build(settings)
        self._batches = BatchQueue(self._scheduler, self._executor, depth=settings.depth)
        self._counts = EngineCounts(self._scheduler, self._connector)
        self._pushed_loads = PushedLoads(self._worker)
        self._jobs: dict[str, tuple[int, int]] = {}
        self._told: list[Told] = []
        self._settle_until: float | None = None
        self._is_leaving = False
        threading.Thread(target=self._listen, name="chaos-listen", daemon=True).start()
        self._say(Ready(self._connector.address[1]))

    def _build(self, settings: EngineSettings) -> None:
        times = settings.timeouts
        self._takes_pushes = settings.num_push_slots > 0
        connector = NixlConnector(
            NixlConfig(
                block_size=settings.block_size,
                engine_id=settings.name,
                port=settings.port,
                key=_KEY,
                lease_s=times.lease_s,
                request_timeout_s=times.request_timeout_s,
                stall_timeout_s=times.stall_timeout_s,
                push_staging_bytes=settings.num_push_slots * settings.block_size * _BYTES_PER_TOKEN,
            )
        )
        self._worker = connector.worker_side()
        self._runner = MisreadingRunner(
            device_s=settings.device_s,
            num_steps_per_fault=settings.num_steps_per_fault,
            rng=random.Random(settings.seed),
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            connector=self._worker,
        )
        self._executor = InProcessExecutor(lambda: self._runner, num_blocks=settings.num_blocks)
        self._executor.start()
        self._connector = connector.scheduler_side()
        self._connector.start(clock=self._clock, notify=self._waker)
        self._connector.set_xfer_handshake_metadata([self._worker.get_handshake_metadata()])
        self._pool = LRUBlockPool(settings.num_blocks, settings.block_size)
        self._scheduler = UnifiedScheduler(
            KVCacheManager(self._pool),
            connector=self._connector,
            clock=self._clock,
            limits=Limits(
                max_num_seqs=16,
                max_num_batched_tokens=settings.num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                load_timeout_s=times.load_timeout_s,
                quarantine_timeout_s=times.quarantine_timeout_s,
                on_load_failure=settings.on_load_failure,
                max_load_retries=settings.max_load_retries,
            ),
        )

    def serve(self) -> None:
        """The loop: take what the router sent, run a step, tell what came of it."""
        while True:
            self._take_commands()
            if self._is_leaving:
                return
            self._tell()
            wait(self._scheduler, self._waker, clock=self._clock, max_wait_s=self._patience_s())
            if self._scheduler.has_requests() or self._scheduler.has_work():
                self._step()
            self._settle()

    def close(self) -> None:
        """Stop every thread."""
        try:
            self._batches.abandon()
        finally:
            self._connector.close()
            self._executor.close()

    def _step(self) -> None:
        try:
            result = self._batches.step()
        except ExecutorDead:
            raise
        except ExecutorError as error:
            if "adversary" not in str(error):
                raise
            self._counts.num_failed_steps += 1
            return
        self._told += [self._as_told(output) for output in result.outputs]

    def _as_told(self, output: RequestOutput) -> Told:
        job, uid = self._jobs[output.request_id]
        num_pushed_blocks = 0
        if output.finish_reason is not None:
            del self._jobs[output.request_id]
            num_staged = self._pushed_loads.take(uid)
            num_pushed_blocks = num_staged if output.num_external_tokens else 0
        return Told(
            job=job,
            token_ids=output.new_token_ids,
            finish_reason="" if output.finish_reason is None else str(output.finish_reason),
            cause=output.cause or "",
            kv_transfer_params=output.kv_transfer_params,
            num_pushed_blocks=num_pushed_blocks,
        )

    def _tell(self) -> None:
        told, self._told = self._told, []
        misreads = tuple(self._runner.misreads)
        if told or misreads:
            self._runner.misreads.clear()
            self._say(Progress(told=tuple(told), counts=self._counts.take(), misreads=misreads))

    # What the router wants.

    def _listen(self) -> None:
        """On a thread of its own: pass on what the router sends, and wake the loop."""
        try:
            while True:
                self._commands.put(self._connection.recv())
                self._waker()
        except (EOFError, OSError):
            self._commands.put(Bye())
            self._waker()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            match self._commands.get():
                case Submit() as submit:
                    self._add(submit)
                case ExpectPush() as ask:
                    self._give_leave(ask)
                case CallOff(push_to):
                    self._connector.call_off_push(push_to)
                case Abort(request_id):
                    self._scheduler.abort_requests([request_id])
                case Explain(request_id):
                    self._explain(request_id)
                case Settle(limit_s):
                    self._settle_until = time.monotonic() + limit_s
                case Bye():
                    self._is_leaving = True

    def _add(self, submit: Submit) -> None:
        deadline = None
        if submit.deadline_s is not None:
            deadline = self._clock.now() + submit.deadline_s
        params = submit.kv_transfer_params or {}
        push_to = params.get("push_to")
        if push_to is not None:
            self._faults.expect_writes(
                push_id=push_to["push_id"],
                fault=submit.transfer_fault,
                notices=submit.notice_faults,
            )
        request = Request(
            submit.request_id,
            submit.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=submit.max_tokens, stop_token_ids=submit.stop_token_ids
            ),
            cache_salt=submit.cache_salt,
            kv_transfer_params=submit.kv_transfer_params,
            deadline=deadline,
        )
        try:
            handle = self._scheduler.add_request(request)
        except (RequestError, TransferError) as error:
            self._told.append(Told(job=submit.job, finish_reason="refused", cause=str(error)))
            return
        self._jobs[submit.request_id] = (submit.job, handle.uid)
        if push_to is None:
            self._faults.expect_read(
                uid=handle.uid,
                transfer_id=params.get("transfer_id", ""),
                fault=submit.transfer_fault,
                notices=submit.notice_faults,
            )

    def _give_leave(self, ask: ExpectPush) -> None:
        request = Request("any", ask.prompt_token_ids)
        push_to = self._connector.expect_push(request) if self._takes_pushes else None
        self._say(Leave(job=ask.job, num_tries=ask.num_tries, push_to=push_to))

    def _explain(self, request_id: str) -> None:
        status = self._scheduler.status(request_id)
        skip = self._scheduler.explain(request_id)
        waits_on = skip.waits_on or f"needs {skip.needed}, has {skip.available}"
        words = f"{'unknown here' if status is None else status.value}: {skip.code.value}, "
        self._say(Explanation(words + waits_on))

    # Coming to rest.

    def _patience_s(self) -> float:
        return 1.0 if self._settle_until is None else 0.02

    def _settle(self) -> None:
        if self._settle_until is None:
            return
        is_at_rest = not self._scheduler.has_requests() and not self._open()
        if is_at_rest or time.monotonic() > self._settle_until:
            self._settle_until = None
            self._tell()
            self._say(Settled(leaks=tuple(self._leaks()), counts=self._counts.take()))

    def _open(self) -> list[str]:
        """Tickets and pushes that this engine gave, or has, and that have not ended."""
        parts = self._connector._parts
        landings = parts.landings.counts()
        numbers = {
            "tickets given": parts.hand_overs.registry.num_open,
            "tickets taken": len(parts.tickets),
            "pushes under way": len(parts.pushes._pushes),
            "ends of pushes not told": len(parts.pushes._untold),
            "slots in use": landings.num_slots - landings.num_free_slots,
            "slots in quarantine": landings.num_quarantined_slots,
        }
        if parts.pushes.awaits_reports:
            numbers[f"awaited of {self._worker._pushes!r}"] = 1
        return [f"{number} {name}" for name, number in numbers.items() if number]

    def _leaks(self) -> list[str]:
        """What is not as in an engine that never ran, apart from cached prefixes."""
        leaks = []
        pool, stats, counts = self._pool, self._scheduler.stats(), self._pool.counts()
        for name in ("num_running", "num_waiting", "num_parked", "num_held_for_peers"):
            if getattr(stats, name):
                leaks.append(f"{name} = {getattr(stats, name)}")
        for name in ("referenced", "held", "quarantined"):
            if getattr(counts, name):
                leaks.append(f"{getattr(counts, name)} blocks {name}")
        if counts.free + counts.evictable != pool.num_usable_blocks:
            leaks.append(
                f"{counts.free + counts.evictable} of {pool.num_usable_blocks} blocks to give out"
            )
        if pool.holds():
            leaks.append(f"{len(pool.holds())} holds")
        return leaks + self._open() + self._counts.leaks() + self._audit()

    def _audit(self) -> list[str]:
        try:
            self._scheduler.check()
            self._pool.check()
            self._connector._parts.hand_overs.registry.check()
            self._connector._parts.landings.check()
        except InvariantBroken as error:
            return [f"broken: {error}"]
        if not self._scheduler.reset_prefix_cache():
            return ["the prefix cache cannot be dropped"]
        return []

    def _say(self, message: Any) -> None:
        _send(self._connection, message)


def _send(connection: Connection, message: Any) -> None:
    """Send, unless the router is gone: `_listen` notices that and ends the loop."""
    try:
        connection.send(message)
    except OSError:
        return
