"""What pdcore is tested with, for testing your own parts the same way.

The fakes need numpy and attrs alone. `BlockPoolMachine`, `block_pool_machine` and the strategies
need the ``testing`` extra; without it, asking for them raises `MissingExtra`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pdcore.clock import VirtualClock
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.testing.drive import Delivered, Driver, run_to_completion
from pdcore.testing.errors import DriveError, PlanError, StaleKV
from pdcore.testing.fake_runner import FakeKVRunner
from pdcore.testing.naive_pool import NaiveBlockPool
from pdcore.testing.oracle import FakeModel

if TYPE_CHECKING:
    from pdcore.testing.pool_machine import BlockPoolMachine, block_pool_machine

__all__ = [
    "BlockPoolMachine",
    "Delivered",
    "DriveError",
    "Driver",
    "FakeKVRunner",
    "FakeModel",
    "LoopbackConnector",
    "LoopbackFabric",
    "LoopbackFaults",
    "NaiveBlockPool",
    "PlanError",
    "StaleKV",
    "VirtualClock",
    "block_pool_machine",
    "run_to_completion",
]

_WITH_ASSERTS = ("pdcore.testing.pool_comparison", "pdcore.testing.pool_machine")
_NEED_HYPOTHESIS = ("BlockPoolMachine", "block_pool_machine")


def __getattr__(name: str) -> Any:
    if name not in _NEED_HYPOTHESIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "pytest" in sys.modules:
        # So that a claim that fails shows the values that it was about, as in a test's own file.
        sys.modules["pytest"].register_assert_rewrite(*_WITH_ASSERTS)
    from pdcore.testing import pool_machine

    return getattr(pool_machine, name)


def __dir__() -> list[str]:
    return __all__
