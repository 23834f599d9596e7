"""PD under an adversary: it cannot lie, hang or leak, and each protection is missed when it is off.

`make chaos` runs the same at full size.
"""

from __future__ import annotations

import pytest
from protections import PROTECTIONS
from run_chaos import run

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

_NUM_REQUESTS = 70
_NUM_REQUESTS_WITHOUT = 250
_NUM_TRIES_WITHOUT = 8


@pytest.mark.parametrize("seed", range(10))
def test_no_request_gets_a_wrong_token_and_no_engine_hangs_or_leaks(seed: int) -> None:
    """Whatever befalls messages, reads and engines, a request gets its solo run or a true cause."""
    report = run(seed, _NUM_REQUESTS)

    assert report.findings == (), report.text()


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_protection_that_is_off_is_missed(protection: str) -> None:
    """The same adversary shows what each protection is for; on its own timing, so soon or late."""
    for seed in range(1, _NUM_TRIES_WITHOUT + 1):
        report = run(seed, _NUM_REQUESTS_WITHOUT, without=protection)
        if report.is_caught:
            return

    pytest.fail(report.text())
