"""The model runner's interface: one worker's model and KV memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from pdcore.connector.base import WorkerConnector
from pdcore.kvcache.spec import KVCacheConfig, KVCacheSpec
from pdcore.messages import (
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    TransferReport,
)

__all__ = ["ModelRunner", "poll_connector"]

logger = logging.getLogger(__name__)


def poll_connector(connector: WorkerConnector | None) -> TransferReport:
    """Ask a worker's connector for its report; a connector that raises harms no step.

    Its loads then end by their deadlines, which the scheduler keeps.
    """
    if connector is None:
        return TransferReport()
    try:
        return connector.get_finished()
    except Exception:
        logger.exception(
            "the KV connector's get_finished() raised; its loads run to their deadline"
        )
        return TransferReport()


class ModelRunner(ABC):
    """Runs the model for one worker. An executor calls it from one thread, in step order:

    `get_kv_cache_spec`, `determine_available_memory`, `initialize_from_config`, then for every step
    `execute_model` and `sample_tokens`, and at the end `close`.
    """

    @abstractmethod
    def get_kv_cache_spec(self) -> KVCacheSpec:
        """What the model keeps for each token."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """How many bytes the KV cache may take, after a trial run at the largest step."""

    @abstractmethod
    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache and register it with the connector. Called once."""

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> None:
        """Apply the plan's changes to the rows and run the forward pass.

        Plans without tokens are executed too when they carry connector work or finished rows.

        Raises:
            ConfigError: the scheduler's pool has more blocks than this worker, or the plan names
                rows that it has not.
            ExecutorError: the plan's columns do not fit each other, or the runner is not ready.
        """

    @abstractmethod
    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        """Draw a token for every sampling row of the last `execute_model`, and return the step's
        result with the connector's report.

        A row whose logits hold NaN or inf, or, where it was not to draw, its keys or values in the
        last layer, has an error in its result: only then does nobody share what it wrote.

        Raises:
            ConfigError: the mask names rows that this worker has not.
            ExecutorError: there is no plan to sample, or the mask's columns do not fit each other.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the model and the KV memory, closing the connector first. May be called twice."""
