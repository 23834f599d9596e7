"""pdcore: parts for LLM inference engines.

A scheduler, a KV block manager, KV connectors and model runners. An application imports the parts
and assembles its own engine loop; `pdcore.loop` has one to start from. Parts that need an optional
dependency live in their own modules: `pdcore.runner`, `pdcore.connector`, `pdcore.testing`.
"""

from pdcore import errors
from pdcore.clock import Clock, MonotonicClock, VirtualClock
from pdcore.kvcache import (
    BlockPool,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    LRUBlockPool,
    PrefixHasher,
)
from pdcore.messages import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepResult
from pdcore.request import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.scheduler import (
    FCFS,
    DeadlineFirst,
    Limits,
    Priority,
    RequestHandle,
    Scheduler,
    SchedulingPolicy,
    ShortestPromptFirst,
    UnifiedScheduler,
)

__all__ = [
    "FCFS",
    "BlockPool",
    "Clock",
    "DeadlineFirst",
    "FinishReason",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheSpec",
    "LRUBlockPool",
    "Limits",
    "ModelRunnerOutput",
    "MonotonicClock",
    "PrefixHasher",
    "Priority",
    "Request",
    "RequestHandle",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
    "SchedulingPolicy",
    "ShortestPromptFirst",
    "StepResult",
    "UnifiedScheduler",
    "VirtualClock",
    "errors",
]
