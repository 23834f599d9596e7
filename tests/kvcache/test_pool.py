"""The reference pool passes the suite that comes with the library, events included."""

from __future__ import annotations

from functools import partial

from pdcore import LRUBlockPool
from pdcore.testing import block_pool_machine

TestLRUBlockPool = block_pool_machine(
    partial(LRUBlockPool, enable_events=True), with_events=True
).TestCase
