"""Checks of settings: each says what was passed, and what should be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from pdcore.errors import ConfigError
from pdcore.shown import shown

__all__ = [
    "check_all_ranks",
    "check_block_size",
    "check_choice",
    "check_count",
    "check_flag",
    "check_line",
    "check_not_negative",
    "check_part",
    "check_pool_fits",
    "check_pool_serves",
    "check_positive",
    "check_share",
]

_MAX_LINE = 256

_T = TypeVar("_T")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `ConfigError` unless ``value`` is one of some strings."""
    known = sorted(choices)
    if not (isinstance(value, str) and value in known):
        raise ConfigError(f"{name}={shown(value)}: must be one of {', '.join(map(repr, known))}")


def check_count(name: str, value: Any, *, at_least: int = 1) -> None:
    """Raise `ConfigError` unless ``value`` is an integer, numpy's included, that is large enough
    and fits into 64 bits. A bool is none."""
    try:
        is_count = not isinstance(value, bool) and at_least <= operator.index(value) < 2**63
    except TypeError:
        is_count = False
    if not is_count:
        raise ConfigError(f"{name}={shown(value)}: must be an integer, at least {at_least}")


def check_flag(name: str, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: must be True or False")


def check_positive(name: str, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is a finite number above 0."""
    if not 0 < _as_float(value) < math.inf:
        raise ConfigError(f"{name}={shown(value)}: must be a finite number above 0")


def check_pool_fits(num_pool_blocks: int, num_blocks: int, *, where: str) -> None:
    """Raise `ConfigError` if a block pool may hand out blocks that there are not."""
    if num_pool_blocks > num_blocks:
        raise ConfigError(
            f"the scheduler's block pool has {num_pool_blocks} blocks, but {where} has "
            f"{num_blocks}: give LRUBlockPool the num_blocks of the workers' KVCacheConfig"
        )


def check_pool_serves(
    num_pool_blocks: int, pool_block_size: int, *, num_blocks: int, block_size: int
) -> None:
    """Raise `ConfigError` unless a worker's KV cache has the pool's blocks, as far as is known."""
    check_pool_fits(num_pool_blocks, num_blocks, where="this worker's KV cache")
    if pool_block_size:
        check_block_size("this worker's block_size", block_size, pool_block_size)


def check_block_size(setting: str, block_size: int, pool_block_size: int) -> None:
    """Raise `ConfigError` unless a part has the pool's block size; ``setting`` names its own."""
    if block_size != pool_block_size:
        raise ConfigError(
            f"{setting}={block_size}, but the scheduler's block pool has blocks of "
            f"{pool_block_size} tokens: make them equal"
        )


def check_all_ranks(metadata: Sequence[_T | None], *, mend: str) -> list[_T]:
    """What every rank sent as handshake metadata; raises `ConfigError` if one sent none."""
    ranks = [handshake for handshake in metadata if handshake is not None]
    if not ranks or len(ranks) != len(metadata):
        raise ConfigError(
            f"{len(metadata) - len(ranks)} of {len(metadata)} ranks sent no handshake metadata: "
            f"{mend}"
        )
    return ranks


def check_line(name: str, value: Any, *, may_be_empty: bool = False) -> None:
    """Raise `ConfigError` unless ``value`` is a string of printable characters, 256 at most."""
    is_line = isinstance(value, str) and value.isprintable() and len(value) <= _MAX_LINE
    if not is_line or not (value or may_be_empty):
        least = 0 if may_be_empty else 1
        raise ConfigError(
            f"{name}={shown(value)}: must be a string of {least} to {_MAX_LINE} printable "
            "characters"
        )


def check_not_negative(name: str, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is a finite number, 0 or above."""
    if not 0 <= _as_float(value) < math.inf:
        raise ConfigError(f"{name}={shown(value)}: must be a finite number, 0 or above")


def check_part(name: str, part: Any, kind: type) -> None:
    """Raise `ConfigError` unless ``part`` is an instance of ``kind``, not that class itself."""
    if not isinstance(part, kind):
        raise ConfigError(f"{name}={shown(part)}: pass an instance of {kind.__name__}")


def check_share(name: str, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is a number from 0 to 1."""
    if not 0 <= _as_float(value) <= 1:
        raise ConfigError(f"{name}={shown(value)}: must be between 0 and 1")


def _as_float(value: Any) -> float:
    """A number as such; NaN for what is none, or too large to be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
