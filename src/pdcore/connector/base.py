"""The two halves of a KV connector.

The scheduler's half decides what to load, save and hand over; the worker's half moves the bytes.
They share one metadata type, which rides in `SchedulerOutput.connector_meta`; the worker's
`TransferReport` rides back in `ModelRunnerOutput`.

What is called when, in one step::

    scheduler's half                     worker's half
    take_events()                        start_save_kv(meta)      before anything is overwritten
    get_num_new_matched_tokens()         start_load_kv(meta)      before the forward pass
    update_state_after_alloc()           wait_for_layer_load()    before each layer's attention
    build_connector_meta()               save_kv_layer()          after each layer's attention
    update_connector_output()            wait_for_save()          after the forward pass
    request_finished()                   get_finished()           once a step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.answers import is_flag, is_integer, is_number, is_text_or_none, must_be
from pdcore.clock import Clock
from pdcore.connector.layout import KVLayout
from pdcore.connector.stats import ConnectorStats
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import LoadFailure, SchedulerOutput, TransferKey, TransferReport
from pdcore.messages.transfers import are_failures, are_keys, are_names
from pdcore.request import FinishReason, Request

__all__ = [
    "ConnectorEvents",
    "ExternalMatch",
    "FinishedBlocks",
    "HandOver",
    "KVCaches",
    "KVConnector",
    "KVLoad",
    "SchedulerConnector",
    "WorkerConnector",
]


@attrs.frozen(kw_only=True)
class ExternalMatch:
    """How much of a prompt a connector can bring.

    Args:
        num_tokens: tokens beyond the local ones; 0 when there is nothing.
        is_async: True parks the request until the load is reported; False promises that the load
            is done when `WorkerConnector.start_load_kv` returns.
        load_s: how many seconds the connector expects the load to take, for `SchedulingPolicy.load`
            to weigh against computing the tokens; None when it cannot say.

    Raises:
        TransferError: something is of another type.
    """

    num_tokens: int = attrs.field(validator=must_be("an integer", is_integer))
    is_async: bool = attrs.field(default=False, validator=must_be("True or False", is_flag))
    load_s: float | None = attrs.field(
        default=None,
        validator=must_be("a number or None", lambda load_s: load_s is None or is_number(load_s)),
    )


@attrs.frozen(kw_only=True, eq=False)
class KVLoad:
    """One load: which tokens go into which blocks.

    Args:
        transfer: names this attempt.
        request: the request it is for.
        num_local_tokens: tokens from the start that need no load; a multiple of the block size.
        num_external_tokens: how many tokens to load after them.
        block_ids: int32, the request's blocks that take them; the first one's first token is token
            ``num_local_tokens`` of the prompt.
        deadline: seconds on the scheduler's clock at which the scheduler gives up.
    """

    transfer: TransferKey
    request: Request
    num_local_tokens: int
    num_external_tokens: int
    block_ids: npt.NDArray[np.int32]
    deadline: float


@attrs.frozen(kw_only=True, eq=False)
class FinishedBlocks:
    """The blocks of a request that just ended.

    Args:
        block_ids: int32, in order of position.
        generations: int64, one for each block.
        num_tokens: how many tokens from the start have their KV in them.
        finish_reason: why it ended.
    """

    block_ids: npt.NDArray[np.int32]
    generations: npt.NDArray[np.int64]
    num_tokens: int
    finish_reason: FinishReason


@attrs.frozen(kw_only=True)
class HandOver:
    """A wish that the blocks of an ended request stay, and what to tell the decode side.

    Args:
        transfer_id: named again in `ConnectorEvents.finished_sending` when the blocks may go, and
            given to no other hand-over before that; None keeps nothing.
        kv_transfer_params: what the application passes on, or None.

    Raises:
        TransferError: something is of another type.
    """

    transfer_id: str | None = attrs.field(
        default=None, validator=must_be("a string or None", is_text_or_none)
    )
    kv_transfer_params: dict[str, Any] | None = attrs.field(
        default=None,
        validator=must_be(
            "a dict or None", lambda params: params is None or isinstance(params, dict)
        ),
    )


@attrs.frozen(kw_only=True)
class ConnectorEvents:
    """What happened to transfers since the scheduler last asked.

    Args:
        finished_sending: hand-overs whose blocks may go: read, refused, or their lease ran out.
        finished_recving: loads that are complete and vouched for.
        failed: loads that are not, and never will be.

    Raises:
        TransferError: something is of another type.
    """

    finished_sending: tuple[str, ...] = attrs.field(default=(), validator=are_names)
    finished_recving: tuple[TransferKey, ...] = attrs.field(default=(), validator=are_keys)
    failed: tuple[LoadFailure, ...] = attrs.field(default=(), validator=are_failures)


class SchedulerConnector(ABC):
    """The half that lives beside the scheduler. Every method is called on the scheduler's thread
    and must not block; a connector that talks to peers does so on threads of its own, started in
    `start` and joined by `close`.

    If a method that concerns one request raises, that request alone ends with ``error``; if one
    that concerns none raises, the log says so and the engine goes on. An answer of another type
    than a method promises is as an error.
    """

    def __init__(self) -> None:
        self._reports: list[TransferReport] = []

    def start(self, *, clock: Clock, notify: Callable[[], None]) -> None:  # noqa: B027
        """Begin work. ``notify`` wakes a sleeping engine loop; it may be called from any thread."""

    def bind_kv_manager(self, manager: KVCacheManager) -> None:  # noqa: B027
        """Meet the block manager of the scheduler that this half is given to. Called once.

        For connectors that name blocks as the manager does (``manager.hasher``), or want to hear
        of blocks that were written (``manager.pool.subscribe``).

        Raises:
            ConfigError: the connector cannot work with this manager.
        """

    def reset_cache(self) -> None:  # noqa: B027
        """Forget every block kept so far: `Scheduler.reset_prefix_cache` forgot those of the pool,
        because of new weights for instance. Nothing loads at that time."""

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:  # noqa: B027
        """Take what each rank's `WorkerConnector.get_handshake_metadata` returned, by rank."""

    def recognizes(self, params: Mapping[str, Any]) -> bool:
        """Whether ``kv_transfer_params``, unchecked ones, look like those that this connector hands
        over. `MultiConnector` asks, to find out for whom they are; the default reads none."""
        return False

    def request_added(self, request: Request, uid: int) -> None:  # noqa: B027
        """A request joins the queue. Check its ``kv_transfer_params``, renew its lease from now.

        Raises:
            InvalidTransferParams: the parameters are not acceptable; the request is refused.
        """

    def request_refused(self, request: Request) -> None:  # noqa: B027
        """A request never joined the queue: it cannot fit, or its id is taken. What its
        ``kv_transfer_params`` promise can be given back at once, unless another request has the
        same ones. They are as unchecked as in `request_added`; what this raises is logged."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        """Say how many tokens beyond ``num_local_tokens`` can be loaded.

        Called when the request could be admitted, perhaps in many steps: it must be repeatable and
        change nothing. None means "ask me again in the next step".
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        """The blocks for a load are there: start it with the next metadata. Once per attempt."""

    @abstractmethod
    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        """The step that would have started the load was abandoned before it reached a worker.

        Its blocks are others' from now on. If this raises, its request ends and `cancel` is called;
        a connector that lets the load begin all the same writes into them.
        """

    @abstractmethod
    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        """Return what the workers must hear in this step, or None. Called once for every plan,
        also for those without tokens. What it returned is never asked for again, unless
        `rebuild_connector_meta` says that it was lost."""

    def rebuild_connector_meta(self, meta: Any) -> None:  # noqa: B027
        """``meta`` never reached a worker: say it again with the next plan."""

    def step_failed(self, meta: Any) -> None:  # noqa: B027
        """The step of ``meta`` was dispatched and failed: the workers may or may not have heard it.

        The loads that the scheduler began in this step have been cancelled by now, and what the
        workers reported with it was taken in. Say again, with the next plan, what must be heard and
        does no harm twice, such as that a load was cancelled; and have what cannot be said twice
        end. A load that is neither stays until its limit: ``Limits.load_timeout_s``, or, cancelled,
        ``Limits.quarantine_timeout_s``.
        """

    @abstractmethod
    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        """A request ended, whether or not it ever had blocks. Called exactly once for each.

        Returns:
            What is to stay and what to tell the decode side; None when there is neither. Nothing
            stays under the ``transfer_id`` of a hand-over that is still open: that is an error.
        """

    @abstractmethod
    def cancel(self, transfer: TransferKey) -> None:
        """Nobody wants this load any more. It must still be reported, as finished or failed, once
        nothing writes to its blocks; until then they are in quarantine."""

    def cut_off(self, transfer: TransferKey) -> None:  # noqa: B027
        """A cancelled load was not reported within its limit: stop it by force."""

    def update_connector_output(self, report: TransferReport) -> None:
        """Take a worker's report. The default passes it on to `take_events` unchanged."""
        if report:
            self._reports.append(report)

    def take_events(self) -> ConnectorEvents:
        """Return what happened since the last call. Called at the start of every `schedule`.

        Events may be late, repeated or about unknown transfers: the scheduler counts those. A load
        that is told to have failed and to be complete at once has failed.
        """
        reports, self._reports = self._reports, []
        return ConnectorEvents(
            finished_sending=tuple(name for r in reports for name in r.finished_sending),
            finished_recving=tuple(key for r in reports for key in r.finished_recving),
            failed=tuple(failure for r in reports for failure in r.failed),
        )

    def next_wakeup(self) -> float | None:
        """When, on the scheduler's clock, a lease or deadline of the connector falls; or None.

        What ended stays due until `take_events` has told it, unless ``notify`` was called for it.
        """
        return None

    def has_pending(self) -> bool:
        """Whether the connector still owes an event for something that no request waits for."""
        return False

    def explain(self, request: Request) -> str | None:
        """In words, what a parked request waits for, for `Scheduler.explain`."""
        return None

    def stats(self) -> ConnectorStats:
        """What became of this engine's hand-overs and loads. On the scheduler's thread.

        `Scheduler.stats` has it too, beside what it counts itself: late events, failed loads,
        tokens that were computed again. The default counts nothing.
        """
        return ConnectorStats()

    def close(self) -> None:  # noqa: B027
        """Stop and join every thread. May be called twice."""


@attrs.frozen(kw_only=True, eq=False)
class KVCaches:
    """A worker's KV memory, as a connector sees it.

    Args:
        buffer: the whole cache, block-major and contiguous: a numpy array or a torch tensor whose
            first axis counts blocks.
        bytes_per_block: size of one block.
        fingerprint: describes model, dtype and layout; two caches with equal fingerprints can
            exchange blocks as bytes.
        layout: what the bytes mean, for connectors that exchange KV between engines of unequal
            shapes; None keeps to equal ones.
    """

    buffer: Any
    bytes_per_block: int
    fingerprint: str
    layout: KVLayout | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.buffer.shape[0])


class WorkerConnector(ABC):
    """The half that lives beside the model. Called on the worker's thread, in step order."""

    @abstractmethod
    def register_kv_caches(self, caches: KVCaches) -> None:
        """Take the KV memory. Called once, before the first step."""

    def get_handshake_metadata(self) -> Any:
        """What a peer must know to reach this rank's memory; picklable, or None."""
        return None

    def start_save_kv(self, meta: Any) -> None:  # noqa: B027
        """Copy away the blocks of this step's metadata that anything in this step, loads included,
        may overwrite. Called before `start_load_kv`, with the same metadata."""

    @abstractmethod
    def start_load_kv(self, meta: Any) -> None:
        """Begin the loads of this step's metadata. Asynchronous loads must not block here."""

    def needs_layer_calls(self) -> bool:
        """Whether `wait_for_layer_load` and `save_kv_layer` must be called in every step.

        Nothing can be called between the layers of a captured graph, so a runner then runs layer by
        layer. The default: whether the class has one of the two of its own.
        """
        own, none = type(self), WorkerConnector
        return (
            own.wait_for_layer_load is not none.wait_for_layer_load
            or own.save_kv_layer is not none.save_kv_layer
        )

    def wait_for_layer_load(self, layer: int) -> None:  # noqa: B027
        """Block until a layer's synchronous loads are in place."""

    def save_kv_layer(self, layer: int) -> None:  # noqa: B027
        """The layer's KV of this step has been written."""

    def wait_for_save(self) -> None:  # noqa: B027
        """Block until what this step must save may be overwritten."""

    @abstractmethod
    def get_finished(self) -> TransferReport:
        """Report what ended since the last call. Called once a step, also in steps without tokens.

        If it raises, the executor reports the loads in flight as failed and goes on.
        """

    def close(self) -> None:  # noqa: B027
        """Stop and join every thread, and let go of the KV memory. May be called twice."""


class KVConnector(ABC):
    """Makes the two halves of one connector. Picklable, so that it can travel to the workers."""

    @abstractmethod
    def scheduler_side(self) -> SchedulerConnector:
        """Make the half for the scheduler. Call once."""

    @abstractmethod
    def worker_side(self, rank: int = 0) -> WorkerConnector:
        """Make the half for the worker of one rank. Call once for each rank."""
