"""How a few rows are selected from a column, and a column of int64 is counted up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["ONE", "index_of"]

# An array, since numpy adds it faster than one of Python's integers.
ONE = np.array(1, np.int64)


def index_of(rows: list[int]) -> slice | npt.NDArray[np.intp]:
    """What selects rows, of which there is at least one, from a column: of one row a slice.

    numpy reads and writes by a slice in half the time that it needs with an array.
    """
    if len(rows) == 1:
        return slice(rows[0], rows[0] + 1)
    return np.array(rows, np.intp)
