"""Every interface on one page.

| interface | implementations |
|---|---|
| `Scheduler` | `UnifiedScheduler` |
| `SchedulingPolicy` | `FCFS`, `Priority`, `ShortestPromptFirst`, `DeadlineFirst`, `LoadCost` |
| `BlockPool`, `EvictionOrder` | `LRUBlockPool`, `LRUOrder` |
| `SchedulerConnector`, `WorkerConnector`, `KVConnector` | null, loopback, NIXL, offload, multi |
| `ModelRunner` | `GPUModelRunner`, `FakeKVRunner` |
| `Executor` | `InProcessExecutor` |
| `GrammarBackend`, `GrammarMatcher` | none yet: bring your own |
| `Clock` | `MonotonicClock`, `VirtualClock` |
"""

from pdcore.clock import Clock
from pdcore.connector.base import KVConnector, SchedulerConnector, WorkerConnector
from pdcore.kvcache.base import BlockPool
from pdcore.kvcache.eviction import EvictionOrder
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor.base import Executor
from pdcore.scheduler.base import Scheduler
from pdcore.scheduler.grammar import GrammarBackend, GrammarMatcher
from pdcore.scheduler.policy import SchedulingPolicy

__all__ = [
    "BlockPool",
    "Clock",
    "EvictionOrder",
    "Executor",
    "GrammarBackend",
    "GrammarMatcher",
    "KVConnector",
    "ModelRunner",
    "Scheduler",
    "SchedulerConnector",
    "SchedulingPolicy",
    "WorkerConnector",
]
