"""Integer columns as few bytes, for messages that cross a process border."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdcore.errors import OutputMismatch

__all__ = ["Columns", "pack", "unpack"]

Int32Array = npt.NDArray[np.int32]

_NOTHING = np.zeros(0, np.int32)

Columns = tuple[bytes, int, tuple[int, ...]]
"""The values of all columns, the bytes of each value, and the length of each column."""


def pack(columns: Sequence[Int32Array]) -> Columns:
    """Several int32 columns as one run of bytes: two a value where all fit, else four.

    Cost: four array operations, however many columns there are.

    Raises:
        OutputMismatch: a column is not int32.
    """
    values = np.concatenate(columns) if columns else _NOTHING
    if values.dtype != np.int32:
        raise OutputMismatch(f"a message has a column of dtype {values.dtype}: pass int32 arrays")
    # All bits that occur anywhere; a negative number has the highest one.
    narrow = 0 <= int(np.bitwise_or.reduce(values)) <= 0xFFFF
    data = values.astype("<u2" if narrow else "<i4", copy=False).tobytes()
    return data, 2 if narrow else 4, tuple(map(len, columns))


def unpack(packed: Columns) -> list[Int32Array]:
    """What `pack` was given. The columns are parts of one array."""
    data, width, sizes = packed
    values = np.frombuffer(data, "<u2" if width == 2 else "<i4").astype(np.int32)
    columns, start = [], 0
    for size in sizes:
        columns.append(values[start : start + size])
        start += size
    return columns
