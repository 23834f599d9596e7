"""The scheduler: which tokens are computed in which step."""

from pdcore.scheduler.base import (
    Limits,
    RequestHandle,
    Scheduler,
    SchedulerStats,
    Skip,
    SkipCode,
)
from pdcore.scheduler.grammar import GrammarBackend, GrammarMatcher
from pdcore.scheduler.load_cost import LoadCost
from pdcore.scheduler.policy import (
    FCFS,
    Admission,
    AdmissionContext,
    DeadlineFirst,
    Priority,
    RunningView,
    SchedulingPolicy,
    ShortestPromptFirst,
)
from pdcore.scheduler.unified import UnifiedScheduler
from pdcore.scheduler.waiting import WaitingView

__all__ = [
    "FCFS",
    "Admission",
    "AdmissionContext",
    "DeadlineFirst",
    "GrammarBackend",
    "GrammarMatcher",
    "Limits",
    "LoadCost",
    "Priority",
    "RequestHandle",
    "RunningView",
    "Scheduler",
    "SchedulerStats",
    "SchedulingPolicy",
    "ShortestPromptFirst",
    "Skip",
    "SkipCode",
    "UnifiedScheduler",
    "WaitingView",
]
