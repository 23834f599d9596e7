"""What travels round one step: plan, result, and what the application is told.

All are frozen and picklable; plans and results are written as packed columns (`pdcore.wire`).
Arrays are columns: entry ``i`` of every array in a group speaks of the same row. Nobody writes to
an array after its message is made.

Those of which a step or a request makes one have no slots: attrs fills a frozen class with slots by
one call a field, and one without by writing its dictionary.
"""

from pdcore.messages.outputs import RequestOutput, StepResult
from pdcore.messages.plan import NewRequestData, SchedulerOutput
from pdcore.messages.result import GrammarBitmask, ModelRunnerOutput, RowError
from pdcore.messages.transfers import LoadFailure, PushReport, TransferKey, TransferReport

__all__ = [
    "GrammarBitmask",
    "LoadFailure",
    "ModelRunnerOutput",
    "NewRequestData",
    "PushReport",
    "RequestOutput",
    "RowError",
    "SchedulerOutput",
    "StepResult",
    "TransferKey",
    "TransferReport",
]
