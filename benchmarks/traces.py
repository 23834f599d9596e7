"""Real request traces: Mooncake's, as published with its paper (FAST'25).

One JSON object a line: ``timestamp`` in ms, ``input_length``, ``output_length`` and ``hash_ids``,
one id for each 512-token block of the prompt, where equal ids mean equal prefixes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_SIZE", "TraceRequest", "exact_lru_hit_rate", "load_mooncake"]

BLOCK_SIZE = 512


@attrs.frozen
class TraceRequest:
    """One request of a trace.

    Args:
        arrival_time: seconds from the start.
        block_ids: the identities of its prompt's blocks.
        num_output_tokens: how many tokens were answered, at least 1.
    """

    arrival_time: float
    block_ids: tuple[int, ...]
    num_output_tokens: int

    def prompt(self) -> npt.NDArray[np.int32]:
        """Tokens that agree exactly where the blocks do, and one more.

        The trace does not tell how full the last block was: it is taken as full, as its id is, and
        the token behind it makes it one that can be found again.
        """
        starts = np.array(self.block_ids, np.int64) * BLOCK_SIZE
        tokens = (starts[:, None] + np.arange(BLOCK_SIZE)).ravel() % (2**31 - 1)
        return np.append(tokens, 0).astype(np.int32)


def load_mooncake(path: Path) -> list[TraceRequest]:
    """The requests of a trace, in order of arrival."""
    requests = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        requests.append(
            TraceRequest(
                arrival_time=entry["timestamp"] / 1000,
                block_ids=tuple(entry["hash_ids"]),
                num_output_tokens=max(entry["output_length"], 1),
            )
        )
    return requests


def exact_lru_hit_rate(requests: Sequence[TraceRequest], num_blocks: int | None) -> float:
    """The share of blocks found by a cache of so many that forgets the least recently used."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_found = num_asked = 0
    for request in requests:
        ids = request.block_ids
        found = next((place for place, key in enumerate(ids) if key not in cache), len(ids))
        num_found += found
        num_asked += len(ids)
        for key in ids:
            cache[key] = None
            cache.move_to_end(key)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_found / num_asked
