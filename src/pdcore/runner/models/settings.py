"""Keys and values of a checkpoint's config, each checked as it is read."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from pdcore.errors import ConfigError

__all__ = ["Settings"]


@attrs.frozen(eq=False)
class Settings:
    """The values of a ``config.json`` or of GGUF metadata. A key that is null counts as absent.

    Every accessor raises `ConfigError` when the value is of another kind, or when it is absent and
    no default is given.

    Args:
        where: what holds them, as messages should call it.
        values: the keys and values, not yet checked.
    """

    where: str
    values: Mapping[str, Any]
    _read: set[str] = attrs.field(factory=set, init=False)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of whatever kind."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(
        self,
        key: str,
        *,
        default: int | None = None,
        at_least: int = 1,
        at_most: int = sys.maxsize,
    ) -> int:
        """Return an integer within bounds."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self._wrong(key, f"an integer >= {at_least}")
        if value > at_most:
            raise self._wrong(key, f"an integer <= {at_most}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a number that is finite and not negative."""
        value = self.get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value <= sys.float_info.max
        ):
            raise self._wrong(key, "a finite number >= 0")
        return float(value)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> Settings:
        """Return the settings under a key; none when it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a mapping")
        return Settings(f"{self.where}: {key}", value)

    def unread(self) -> dict[str, Any]:
        """Return the keys that nothing has asked for, with their values."""
        return {key: value for key, value in self.values.items() if key not in self._read}

    def _wrong(self, key: str, expected: str) -> ConfigError:
        if key not in self.values:
            return ConfigError(f"{self.where} lacks {key}: it must be {expected}")
        value = reprlib.repr(self.values[key])
        return ConfigError(f"{self.where} has {key}={value}: it must be {expected}")
