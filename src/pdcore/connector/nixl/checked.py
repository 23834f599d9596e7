"""Validators for data that strangers send. Each raises `ValueError` in a few plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["MAX_LEASE_S", "hex_digits", "int_list", "integer", "seconds", "text"]

MAX_LEASE_S = 86400.0
"""The longest lease that an engine may give and a stranger may name."""

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def text(*, max_length: int = 256, allow_empty: bool = False) -> Validator:
    """A string without control characters."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{field.name} is not a plain string")
        if not (allow_empty or value) or len(value) > max_length:
            raise ValueError(f"{field.name} has {len(value)} characters, not 1..{max_length}")

    return check


def hex_digits(length: int) -> Validator:
    """A string of exactly so many lower-case hexadecimal digits."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        is_hex = isinstance(value, str) and not set(value) - set("0123456789abcdef")
        if not is_hex or len(value) != length:
            raise ValueError(f"{field.name} is not {length} hexadecimal digits")

    return check


def integer(low: int, high: int) -> Validator:
    """An integer in ``low..high``; a bool is none."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{field.name} is not an integer in {low}..{high}")

    return check


def seconds(high: float, *, allow_zero: bool = False) -> Validator:
    """A number in ``(0, high]``, or zero where that is allowed."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        is_number = type(value) in (int, float)
        if not is_number or not (0 < value <= high or (allow_zero and value == 0)):
            raise ValueError(f"{field.name} is not a number of seconds in (0, {high:g}]")

    return check


def int_list(high: int, *, max_length: int) -> Validator:
    """A tuple of integers in ``0..high``."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, tuple) or len(value) > max_length:
            raise ValueError(f"{field.name} is not a list of at most {max_length} integers")
        if any(type(item) is not int or not 0 <= item <= high for item in value):
            raise ValueError(f"{field.name} holds something that is not an integer in 0..{high}")

    return check
