"""Prompts as arrays: checked once, and never changed after."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.errors import InvalidRequest
from pdcore.masks import any_set

__all__ = ["as_token_ids"]

# An array, since numpy compares with it faster than with one of Python's integers.
_ZERO = np.array(0, np.int32)


def _packed(values: list[int] | tuple[int, ...]) -> npt.NDArray[np.int32] | None:
    """A sequence of token ids as an array; None when it may hold anything else.

    Packing a list costs a third of what making an array of it does.
    """
    if values and isinstance(values[0], bool):
        return None
    try:
        packed = struct.pack(f"{len(values)}I", *values)
    except (struct.error, TypeError, ValueError):
        return None
    ids = np.frombuffer(packed, np.int32)
    return None if not ids.size or any_set(ids < _ZERO) else ids


# Named, since `list | tuple` is made anew wherever it is written.
_SEQUENCES = (list, tuple)


def as_token_ids(values: Any) -> npt.NDArray[np.int32]:
    """Any flat sequence of token ids as an int32 array that nobody can write to.

    Raises:
        InvalidRequest: it is empty, not flat, or not made of token ids.
    """
    if isinstance(values, _SEQUENCES):
        packed = _packed(values)
        if packed is not None:
            return packed
    if values is None or isinstance(values, str | bytes):
        raise InvalidRequest(
            f"prompt_token_ids is a {type(values).__name__}: pass token ids; "
            "pdcore has no tokenizer"
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidRequest(f"prompt_token_ids cannot be made an array: {error}") from None
    if array.ndim != 1 or array.size == 0:
        raise InvalidRequest(
            f"prompt_token_ids has shape {array.shape}: pass a flat sequence of at least one id"
        )
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"prompt_token_ids has dtype {array.dtype}: pass integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise InvalidRequest(f"prompt_token_ids spans {low}..{high}: ids must lie in 0..2**31-1")
    # What lies in bytes can never change; what is only marked as read-only can.
    owner: object = array.base
    if array.dtype == np.int32 and isinstance(owner, bytes):
        return array
    return np.frombuffer(np.ascontiguousarray(array, np.int32).tobytes(), np.int32)
