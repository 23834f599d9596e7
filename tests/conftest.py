"""How the property tests explore."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no judgement on how long one takes: CI machines are busy.
settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# For `make soak`: new examples in every run, and many of them.
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=3000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")
