"""Whether the workers have every block of the pool."""

from __future__ import annotations

from collections.abc import Iterable

from pdcore.checks import check_pool_fits

__all__ = ["BlockCount"]


class BlockCount:
    """Hears how many blocks the pool has, and each rank; compares once it knows both.

    A block that the pool hands out and a rank does not have would be noticed only once somebody
    computes, loads or sends it, which may be hours later, under load.
    """

    def __init__(self) -> None:
        self._num_in_pool: int | None = None
        self._num_on_ranks: tuple[int, ...] = ()

    def of_pool(self, num_blocks: int) -> None:
        """The scheduler's pool has so many. Raises `ConfigError` if a rank has fewer."""
        self._num_in_pool = num_blocks
        self._compare()

    def of_ranks(self, num_blocks: Iterable[int]) -> None:
        """The ranks have so many, in order of rank. Raises `ConfigError` if the pool has more."""
        self._num_on_ranks = tuple(num_blocks)
        self._compare()

    def _compare(self) -> None:
        if self._num_in_pool is not None:
            for rank, num_blocks in enumerate(self._num_on_ranks):
                check_pool_fits(self._num_in_pool, num_blocks, where=f"rank {rank}'s KV memory")
