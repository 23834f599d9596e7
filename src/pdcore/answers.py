"""Checks of what connectors answer: what passes them, the engine can rely on.

Most stand as validators in the classes that connectors make, and raise in the connector's own call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from pdcore.errors import TransferError
from pdcore.shown import shown

__all__ = [
    "check_answer",
    "check_free",
    "check_time",
    "is_flag",
    "is_integer",
    "is_number",
    "is_text_or_none",
    "must_be",
    "must_be_tuple",
]

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_FLAGS = (bool, np.bool_)
_NUMBERS = (int, float, np.integer, np.floating)


def check_answer(answer: object, kind: type, *, may_be_none: bool = False) -> None:
    """Raise `TransferError` unless a hook answered with an instance of ``kind``."""
    if not (isinstance(answer, kind) or (may_be_none and answer is None)):
        raise TransferError(f"it returned {shown(answer)}, which is no {kind.__name__}")


def check_free(transfer_id: str | None, *, is_open: bool) -> None:
    """Raise `TransferError` if a hand-over is given the name of one that is still open."""
    if is_open:
        raise TransferError(
            f"it gave the transfer_id {shown(transfer_id)} of a hand-over that is still open: name "
            "each differently"
        )


def check_time(answer: object) -> None:
    """Raise `TransferError` unless a hook answered with a time, or None."""
    if not (answer is None or is_number(answer)):
        raise TransferError(f"it returned {shown(answer)}, which is no time")


def must_be(what: str, is_right: Callable[[Any], bool]) -> Validator:
    """A validator that raises `TransferError` for a value that is not ``what`` it should be."""

    def check(message: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not is_right(value):
            raise TransferError(
                f"{type(message).__name__}({field.name}={shown(value)}): must be {what}"
            )

    return check


def must_be_tuple(what: str, is_right: Callable[[Any], bool]) -> Validator:
    """A validator for tuples of one kind of thing."""
    return must_be(
        f"a tuple of {what}", lambda value: isinstance(value, tuple) and all(map(is_right, value))
    )


def is_integer(value: object) -> bool:
    """Whether a value is an integer, numpy's included; a bool is none."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, _FLAGS)


def is_number(value: object) -> bool:
    """Whether a value can be compared with other numbers; a bool and NaN are none."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and bool(value == value)


def is_flag(value: object) -> bool:
    """Whether a value is True or False, numpy's included."""
    return isinstance(value, _FLAGS)


def is_text_or_none(value: object) -> bool:
    """Whether a value is a string, or None."""
    return value is None or isinstance(value, str)
