"""Executors: they carry plans to the workers and bring one result back."""

from __future__ import annotations

from pdcore.runner.executor.base import Executor
from pdcore.runner.executor.inprocess import InProcessExecutor
from pdcore.runner.executor.transfer_reports import TransferReportMerger

__all__ = ["Executor", "InProcessExecutor", "TransferReportMerger"]
