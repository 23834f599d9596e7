"""Property-test a block pool of your own in one line, and see a bug being caught.

`block_pool_machine` calls your pool in random ways, legal and illegal, and compares everything that
can be seen with a slow and simple reference. In a test file the line is all there is:

    TestMyPool = block_pool_machine(lambda num_blocks, block_size: MyPool(...)).TestCase
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdcore import BlockPool, LRUBlockPool
from pdcore.testing import block_pool_machine

CONCLUSION = """
What to conclude: MyPool kept every promise of a BlockPool, so it can take LRUBlockPool's place.
BuggyPool broke one. The calls above are the fewest that show it, and a test to keep; they point at
release(), of whose blocks the first ones must be reused first."""

_IS_CHECK = "hypothesis_stateful_invariant"  # these run after every call; one need not see them


class MyPool(LRUBlockPool):
    """A pool that also counts how full it ever was."""

    max_num_used = 0

    def allocate(self, n: int) -> npt.NDArray[np.int32]:
        ids = super().allocate(n)
        num_used = self.num_usable_blocks - self.num_free_blocks
        self.max_num_used = max(self.max_num_used, num_used)
        return ids


class BuggyPool(LRUBlockPool):
    """A pool that reuses the head of a finished prompt before its tail.

    Nothing breaks: every answer stays right. But a prefix without its head is never found again, so
    the cache hardly ever hits, and no test of answers would notice.
    """

    def release(self, ids: npt.NDArray[np.int32]) -> None:
        super().release(ids[::-1])


def counterexample(make_pool: Callable[[int, int], BlockPool]) -> str | None:
    """Test a pool; the error and the shortest sequence of calls that leads to it, or None."""
    machine = block_pool_machine(make_pool, sizes=(4, 8))
    profile = settings(
        max_examples=60,
        stateful_step_count=12,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )
    try:
        run_state_machine_as_test(machine, settings=profile)
    except Exception as error:  # whatever the pool raised, or the machine's own assertion
        checks = [name for name in dir(machine) if hasattr(getattr(machine, name), _IS_CHECK)]
        calls = "\n".join(getattr(error, "__notes__", [])).splitlines()
        kept = [call for call in calls if call not in {f"state.{name}()" for name in checks}]
        return "\n".join([f"{type(error).__name__}: {error}", *kept])
    return None


def examine(pool: Callable[[int, int], BlockPool], name: str) -> None:
    """Test a pool and say what came of it."""
    start = time.perf_counter()
    found = counterexample(pool)
    seconds = time.perf_counter() - start
    print(f"{name}: {'ok' if found is None else 'BROKEN'} ({seconds:.1f} s)")
    if found is not None:
        print("\n".join(f"  {line}" for line in found.splitlines()))


if __name__ == "__main__":
    examine(MyPool, "MyPool")
    examine(BuggyPool, "BuggyPool")
    print(CONCLUSION)
