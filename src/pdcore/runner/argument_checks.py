"""Checks of what a runner is made with, before a checkpoint is read for it."""

from __future__ import annotations

import operator
import os
from typing import Any

from pdcore.checks import check_count, check_flag, check_part, check_positive
from pdcore.connector.base import WorkerConnector
from pdcore.errors import ConfigError
from pdcore.kvcache.spec import KVCacheConfig, KVCacheSpec
from pdcore.runner.models.config import ModelConfig
from pdcore.scheduler.base import Limits

__all__ = ["check_cache_config", "check_model_serves", "check_runner_settings"]


def check_runner_settings(
    *,
    model_path: Any,
    limits: Any,
    connector: Any,
    memory_utilization: Any,
    kv_cache_memory_bytes: Any,
    num_threads: Any,
    seed: Any,
    keep_logits: Any,
    graph_capture: Any,
) -> None:
    """Raise `ConfigError` for the first argument of `GPUModelRunner` that cannot be meant."""
    if not isinstance(model_path, str | os.PathLike):
        raise ConfigError(f"model_path={model_path!r:.80}: pass the path of a folder or a file")
    check_part("limits", limits, Limits)
    if connector is not None:
        check_part("connector", connector, WorkerConnector)
    if memory_utilization is not None:
        check_positive("memory_utilization", memory_utilization)
        if memory_utilization > 1:
            raise ConfigError(
                f"memory_utilization={memory_utilization}: must be more than 0 and at most 1"
            )
    if kv_cache_memory_bytes is not None:
        check_count("kv_cache_memory_bytes", kv_cache_memory_bytes)
    if num_threads is not None:
        check_count("num_threads", num_threads)
    if seed is not None and not _is_seed(seed):
        raise ConfigError(f"seed={seed!r:.80}: must be an integer in 0..2**64-1, or None")
    check_flag("keep_logits", keep_logits)
    if graph_capture is not None and not callable(getattr(graph_capture, "capture", None)):
        raise ConfigError(f"graph_capture={graph_capture!r:.80}: pass a GraphCapture, or None")


def check_model_serves(limits: Limits, config: ModelConfig) -> None:
    """Raise `ConfigError` if a model has fewer positions than sequences may have tokens."""
    longest = config.max_position_embeddings
    if limits.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={limits.max_model_len} is over the {longest} positions that the model "
            "was trained for. Lower it."
        )


def check_cache_config(config: KVCacheConfig, spec: KVCacheSpec) -> None:
    """Raise `ConfigError` unless a cache of that configuration can serve a model of that spec."""
    check_part("config", config, KVCacheConfig)
    if config.spec != spec:
        raise ConfigError(
            f"the KV cache was configured for {config.spec}, but the model needs {spec}"
        )
    check_count("num_blocks", config.num_blocks, at_least=2)  # the null block is one


def _is_seed(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) < 2**64
    except TypeError:
        return False
