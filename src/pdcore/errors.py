"""Every exception that pdcore raises on purpose.

::

    PdcoreError
    ├── ConfigError (ValueError)        a part was built with settings that cannot work
    │   ├── UnsupportedModel            the model's architecture or weights cannot be run
    │   ├── MissingWeights              a checkpoint lacks tensors that its config calls for
    │   └── MissingExtra (ImportError)  an optional dependency is not installed
    ├── RequestError
    │   ├── InvalidRequest (ValueError) the request can never be served as it stands
    │   └── DuplicateRequest            the id's last request has not ended, or nobody was told yet
    ├── BlockError
    │   ├── OutOfBlocks                 fewer blocks are free than were asked for
    │   └── BlockMisuse                 a block was released, retained or published wrongly
    ├── SchedulerError
    │   ├── IllegalTransition           a request was moved between states that are not connected
    │   ├── OutputMismatch              a result does not answer its plan
    │   ├── OutputOrder                 results came back, or were given up, out of order
    │   ├── ReentrantCall               a hook called the scheduler that waits for its answer
    │   └── SchedulerStalled            work exists, waits on nothing, and no step can advance it
    ├── InvariantBroken                 check() found state that must not exist
    ├── ExecutorError
    │   └── ExecutorDead                the workers are gone; no further step can run
    └── TransferError
        ├── InvalidTransferParams       kv_transfer_params are malformed, forged or not allowed
        ├── HandshakeRefused            the peer is incompatible or failed authentication
        ├── PeerLost                    the peer died, restarted or stopped answering
        └── AddressInUse                the side channel cannot bind its address

Catch `PdcoreError` for all of them, or a branch for one kind of fault.
"""

from __future__ import annotations

__all__ = [
    "AddressInUse",
    "BlockError",
    "BlockMisuse",
    "ConfigError",
    "DuplicateRequest",
    "ExecutorDead",
    "ExecutorError",
    "HandshakeRefused",
    "IllegalTransition",
    "InvalidRequest",
    "InvalidTransferParams",
    "InvariantBroken",
    "MissingExtra",
    "MissingWeights",
    "OutOfBlocks",
    "OutputMismatch",
    "OutputOrder",
    "PdcoreError",
    "PeerLost",
    "ReentrantCall",
    "RequestError",
    "SchedulerError",
    "SchedulerStalled",
    "TransferError",
    "UnsupportedModel",
]


class PdcoreError(Exception):
    """Base of every exception that pdcore raises on purpose."""


class ConfigError(PdcoreError, ValueError):
    """Raised when a part is built with settings that cannot work together."""


class UnsupportedModel(ConfigError):
    """Raised when a checkpoint's architecture or weight format cannot be run."""


class MissingWeights(ConfigError):
    """Raised when a checkpoint lacks tensors that its config calls for, or its file is absent."""


class MissingExtra(ConfigError, ImportError):
    """Raised when a part needs an optional dependency that is not installed.

    Args:
        part: the public name that was asked for, such as ``pdcore.runner.GPUModelRunner``.
        extra: the extra that brings the dependency, such as ``torch``.
        missing: the module that failed to import.
    """

    def __init__(self, part: str, extra: str, missing: str) -> None:
        super().__init__(
            f"{part} needs the module {missing!r}, which is not installed. "
            f"Install it with: pip install 'pdcore[{extra}]'"
        )
        self.part = part
        self.extra = extra
        self.missing = missing

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), (self.part, self.extra, self.missing)


class RequestError(PdcoreError):
    """Base of the errors that concern one request and harm no other."""


class InvalidRequest(RequestError, ValueError):
    """Raised when a request can never be served as it stands."""


class DuplicateRequest(RequestError):
    """Raised when a request is added under the id of one that has not ended, or whose end was not
    delivered yet."""


class BlockError(PdcoreError):
    """Base of the block pool's errors. The pool is unchanged when one is raised."""


class OutOfBlocks(BlockError):
    """Raised when fewer blocks are free than were asked for.

    Args:
        needed: how many blocks were asked for.
        available: how many were free or evictable.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"{needed} blocks were asked for and {available} are free. "
            "Release blocks, preempt a request, or give the pool more memory."
        )
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int]]:
        return type(self), (self.needed, self.available)


class BlockMisuse(BlockError):
    """Raised when a block is released, retained, held or published against the rules."""


class SchedulerError(PdcoreError):
    """Base of the scheduler's own errors."""


class IllegalTransition(SchedulerError):
    """Raised when a request is moved between states that are not connected."""


class OutputOrder(SchedulerError):
    """Raised when a step's results, or its abandonment, come out of order."""


class OutputMismatch(SchedulerError):
    """Raised when a runner's result names rows, epochs or tokens that its plan did not ask for."""


class ReentrantCall(SchedulerError):
    """Raised when a hook calls back into the scheduler that waits for its answer."""


class SchedulerStalled(SchedulerError):
    """Raised when work exists, none of it waits on the outside, and no step can advance it."""


class InvariantBroken(PdcoreError):
    """Raised by ``check()`` when the state breaks a rule that must always hold."""


class ExecutorError(PdcoreError):
    """Raised when a worker could not run a step. The message names the worker and the cause."""


class ExecutorDead(ExecutorError):
    """Raised when the workers are gone; no further step can run on this executor."""


class TransferError(PdcoreError):
    """Base of the errors of KV transfer between engines."""


class InvalidTransferParams(TransferError, ValueError):
    """Raised when ``kv_transfer_params`` are malformed, forged, expired or not allowed."""


class HandshakeRefused(TransferError):
    """Raised when a peer runs something incompatible or fails authentication."""


class PeerLost(TransferError):
    """Raised when a peer died, restarted or stopped answering."""


class AddressInUse(TransferError, OSError):
    """Raised when the side channel cannot bind the address it was given."""
