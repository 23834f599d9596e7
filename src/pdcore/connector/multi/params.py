"""``kv_transfer_params`` of several connectors: joined on one side, told apart on the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pdcore.errors import InvalidTransferParams
from pdcore.shown import shown

__all__ = ["is_joined", "join_params", "named_parts", "split_params"]

_VERSION = 1
_KIND = "multi"


def join_params(
    parts: Mapping[str, Mapping[str, Any]], *, is_plain: bool = True
) -> dict[str, Any] | None:
    """What to tell the decode side, as plain data that survives JSON.

    Args:
        parts: the parameters of each connector that has some, by name.
        is_plain: whether those of one alone are returned unchanged, without its name.
    """
    if not parts:
        return None
    if len(parts) == 1 and is_plain:
        (part,) = parts.values()
        return dict(part)
    return {
        "do_remote_prefill": True,
        "kind": _KIND,
        "version": _VERSION,
        "connectors": {name: dict(part) for name, part in parts.items()},
    }


def is_joined(params: Mapping[str, Any]) -> bool:
    """Whether parameters say of themselves that `join_params` made them out of several."""
    return params.get("kind") == _KIND


def split_params(
    params: Mapping[str, Any], known_names: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Read what `join_params` made out of several; whose part is whose, by name.

    The parts are as unchecked as before: that is for their connectors to do.

    Raises:
        InvalidTransferParams: they are of another version, malformed, or for a connector that is
            not here.
    """
    version = params.get("version")
    if type(version) is not int or version != _VERSION:
        raise InvalidTransferParams(
            f"kv_transfer_params of several connectors are of version {shown(version)}, this "
            f"engine reads version {_VERSION}: run the same pdcore on both engines"
        )
    if params.get("do_remote_prefill") is not True:
        raise InvalidTransferParams(
            "kv_transfer_params['do_remote_prefill'] is missing or malformed. "
            "Pass on what the prefill engine returned, unchanged."
        )
    return named_parts(params, known_names)


def named_parts(
    params: Mapping[str, Any], known_names: Collection[str], *, what: str = "kv_transfer_params"
) -> dict[str, Mapping[str, Any]]:
    """Whose part of parameters is whose, by name; ``what`` says in messages what they are.

    Raises:
        InvalidTransferParams: they are malformed, or for a connector that is not here.
    """
    parts = params.get("connectors")
    if not isinstance(parts, Mapping) or not parts:
        raise InvalidTransferParams(
            f"{what}['connectors']={shown(parts)} is missing or malformed. "
            "Pass on what the other engine returned, unchanged."
        )
    for name, part in parts.items():
        if name not in known_names:
            raise InvalidTransferParams(
                f"{what} are for a connector {shown(name)}, this engine has "
                f"{', '.join(map(repr, known_names))}: give the connectors of both engines the "
                "same names"
            )
        if not isinstance(part, Mapping):
            raise InvalidTransferParams(
                f"{what}['connectors'][{name!r}]={shown(part)}: expected a mapping"
            )
    return dict(parts)
