"""Whether to load KV or to compute it again, by what each takes."""

from __future__ import annotations

from typing import Any

from pdcore.checks import check_not_negative
from pdcore.connector.base import ExternalMatch
from pdcore.request import Request
from pdcore.scheduler.policy import SchedulingPolicy

__all__ = ["LoadCost"]


class LoadCost(SchedulingPolicy):
    """Declines loads that would take longer than computing the tokens. Goes before another policy::

        class Policy(LoadCost, Priority):
            "By priority, and without loads that do not pay."

        policy = Policy(prefill_s_per_token=5e-5, displace=True)

    A load takes what its connector expects (`ExternalMatch.load_s`: bytes over bandwidth) and
    ``load_overhead_s``, for being parked and taken up again. A load whose connector cannot say is
    taken. It is all of a match or none.

    Args:
        prefill_s_per_token: what the model needs for a token of a prompt; as a step does it, in a
            batch with others.
        load_overhead_s: what any load costs, however short.
        options: for the policy that comes after.

    Raises:
        ConfigError: a time is no finite number, or negative.
    """

    def __init__(
        self, *, prefill_s_per_token: float, load_overhead_s: float = 0.0, **options: Any
    ) -> None:
        super().__init__(**options)
        check_not_negative("prefill_s_per_token", prefill_s_per_token)
        check_not_negative("load_overhead_s", load_overhead_s)
        self._prefill_s_per_token = prefill_s_per_token
        self._load_overhead_s = load_overhead_s

    def load(self, request: Request, match: ExternalMatch, num_local_tokens: int) -> int:
        if match.load_s is not None:
            compute_s = match.num_tokens * self._prefill_s_per_token
            if match.load_s + self._load_overhead_s > compute_s:
                return 0
        return super().load(request, match, num_local_tokens)
