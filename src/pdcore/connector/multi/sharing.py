"""One request as each of several connectors sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from pdcore.connector.base import ExternalMatch, SchedulerConnector
from pdcore.connector.multi.asking import ask
from pdcore.connector.multi.params import is_joined, named_parts, split_params
from pdcore.connector.tickets import asks_for_hand_over
from pdcore.errors import InvalidTransferParams
from pdcore.request import Request
from pdcore.shown import shown

__all__ = ["Offers", "SharedRequest"]


@attrs.define(eq=False, kw_only=True)
class SharedRequest:
    """A request that joined the queue.

    Args:
        views: what each connector that takes part was shown, by name, in order of preference.
        passed_over: those of them that raised for it, and are not asked for loads any more.
        failed: those of them whose load for it failed: they are asked last.
        match: who has KV for it, and what, as of the last time it was asked.
    """

    views: dict[str, Request] = attrs.field(factory=dict)
    passed_over: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)
    match: tuple[str, ExternalMatch] | None = None

    @property
    def sources(self) -> list[str]:
        """Whom to ask for its KV, in this order."""
        names = [name for name in self.views if name not in self.passed_over]
        return sorted(names, key=self.failed.__contains__)


@attrs.frozen(kw_only=True, eq=False)
class Offers:
    """Who is to be shown a request's ``kv_transfer_params``, and which.

    Args:
        plain: the request without what is meant for one connector.
        made: by name, the request as those may see it who can do something with its parameters.
        is_choice: whether one of them is to take it, the first that accepts; else each must.
    """

    plain: Request
    made: Mapping[str, Request]
    is_choice: bool = False

    @classmethod
    def of(cls, request: Request, halves: Mapping[str, SchedulerConnector]) -> Offers:
        """Raise `InvalidTransferParams` when no connector can do anything with the parameters."""
        params = request.kv_transfer_params
        if params is None:
            return cls(plain=request, made={})
        rest: dict[str, Any] | None = None
        if asks_for_hand_over(params):
            if params.get("do_remote_prefill") is not True:
                return cls._to_push(request, halves.keys())
            rest = {"do_remote_decode": True}
        plain = attrs.evolve(request, kv_transfer_params=rest)
        if is_joined(params):
            parts = split_params(params, halves.keys())
            made = {
                name: attrs.evolve(request, kv_transfer_params={**part, **(rest or {})})
                for name, part in parts.items()
            }
            return cls(plain=plain, made=made)
        made = {
            name: request
            for name, half in halves.items()
            if ask(name, half.recognizes, params, otherwise=False, check=bool)
        }
        if not made:
            raise InvalidTransferParams(
                f"kv_transfer_params of kind {shown(params.get('kind'))} are for none of the "
                f"connectors {', '.join(map(repr, halves))}: prefill and decode must use the same"
            )
        return cls(plain=plain, made=made, is_choice=True)

    @classmethod
    def _to_push(cls, request: Request, names: Collection[str]) -> Offers:
        """A prompt to hand over: leave to push that names a connector is for that one alone."""
        params = request.kv_transfer_params or {}
        push_to = params.get("push_to")
        if not isinstance(push_to, Mapping) or "connectors" not in push_to:
            return cls(plain=request, made={})
        rest = {name: value for name, value in params.items() if name != "push_to"}
        made = {
            name: attrs.evolve(request, kv_transfer_params={**rest, "push_to": leave})
            for name, leave in named_parts(push_to, names, what="push_to").items()
        }
        return cls(plain=attrs.evolve(request, kv_transfer_params=rest), made=made)
