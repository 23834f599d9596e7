"""The executor's interface: it carries plans to the workers and brings one result back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, overload

from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor"]


class Executor(ABC):
    """Runs one `ModelRunner` for each rank.

    The engine's thread is the only caller. For each plan it calls `execute_model` and then
    `sample_tokens`; with ``non_block=True`` both return at once, and later calls queue behind them.
    Any number of plans may be queued: calls run in the order in which they were made, so a plan's
    tokens are drawn before the forward pass of the next one begins.

    A plan that fails does not stop those queued behind it, which were made as if it had run. What
    they give is worth nothing: the caller waits for them, and takes all of them back.
    """

    @abstractmethod
    def start(self) -> None:
        """Start the workers and build their runners; return when all are ready.

        Raises:
            Exception: whatever a worker's runner raised while it was built; nothing is left.
        """

    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[True]
    ) -> Future[None]: ...

    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[False] = False
    ) -> None: ...

    @abstractmethod
    def execute_model(
        self, output: SchedulerOutput, *, non_block: bool = False
    ) -> Future[None] | None:
        """Run the forward pass of a plan on every rank.

        Raises:
            ExecutorError: a rank failed; by the future when ``non_block``.
            ExecutorDead: the workers are gone.
        """

    @overload
    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput]: ...

    @overload
    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...

    @abstractmethod
    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: bool = False
    ) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        """Draw the tokens of the oldest executed plan that was not sampled yet. Errors as above."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        output_rank: int | None = None,
    ) -> list[Any]:
        """Call a method of the runner (or a callable that takes the runner) on every rank.

        Returns:
            One result for each rank, or for ``output_rank`` alone, in a list.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise `ExecutorDead` if a worker is gone."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers; outstanding futures fail with `ExecutorDead`. May be called twice."""
