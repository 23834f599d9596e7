"""Settings of every kind refuse what makes no sense, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from pdcore import Limits, LRUBlockPool
from pdcore.connector import MultiConnector
from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl import NixlConfig
from pdcore.connector.offload import OffloadConfig
from pdcore.errors import ConfigError
from pdcore.kvcache import KVCacheSpec
from pdcore.testing.naive_pool import NaiveBlockPool

LAYOUT = {
    "model": "m",
    "dtype": "float32",
    "element_size": 4,
    "num_layers": 1,
    "num_components": 2,
    "block_size": 4,
    "num_kv_heads": 1,
    "head_dim": 8,
}
SETTINGS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (Limits, {}),
    (NixlConfig, {"block_size": 4}),
    (OffloadConfig, {"host_bytes": 1 << 20}),
    (KVCacheSpec, {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}),
    (KVLayout, LAYOUT),
]
ODD = ["x", b"x", 5, -1, 1.5, True, [1], (1, 2), {}, {1: 2}, object(), float("nan"), None, [None]]
ODD += [["x", 3], np.array([1, 2]), "two\nlines", "x" * 300, type, ...]
NO_NUMBERS = ["x", b"x", [1], (1, 2), {}, object(), float("nan")]
NO_COUNTS = [*NO_NUMBERS, 1.5, True, -1, 1 << 70, float("inf")]
NO_SECONDS = [*NO_NUMBERS, True, -0.1, 10**400, 0, float("inf")]


def numeric_fields(kind: str) -> list[Any]:
    """Fields of all settings by their annotated type, as test parameters."""
    return [
        pytest.param(make, base, field.name, id=f"{make.__name__}-{field.name}")
        for make, base in SETTINGS
        for field in attrs.fields(make)  # type: ignore[arg-type]
        if str(field.type).removesuffix(" | None") == kind
    ]


def assert_refused(make: Callable[..., Any], base: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make(**base | {name: value})


@pytest.mark.parametrize(("make", "base", "name"), numeric_fields("int"))
def test_counts_are_whole_numbers(
    make: Callable[..., Any], base: dict[str, Any], name: str
) -> None:
    """Whatever is no integer of a sensible size is refused in a sentence that names the field."""
    for value in NO_COUNTS:
        assert_refused(make, base, name, value)


@pytest.mark.parametrize(("make", "base", "name"), numeric_fields("float"))
def test_seconds_and_shares_are_finite_numbers(
    make: Callable[..., Any], base: dict[str, Any], name: str
) -> None:
    """The same for what may have a fraction."""
    for value in NO_SECONDS:
        if value != 0 or not name.endswith("_share"):
            assert_refused(make, base, name, value)


@pytest.mark.parametrize(("make", "base", "name"), numeric_fields("bool"))
def test_flags_are_true_or_false(make: Callable[..., Any], base: dict[str, Any], name: str) -> None:
    """A flag that is a string would be true whatever it says."""
    for value in (*NO_NUMBERS, None, 1, "False"):
        assert_refused(make, base, name, value)


@pytest.mark.parametrize(
    ("make", "base", "name"),
    [
        pytest.param(make, base, field.name, id=f"{make.__name__}-{field.name}")
        for make, base in SETTINGS
        for field in attrs.fields(make)  # type: ignore[arg-type]
    ],
)
def test_whatever_is_passed_is_taken_or_refused_by_name(
    make: Callable[..., Any], base: dict[str, Any], name: str
) -> None:
    """No odd value, in whatever setting, raises anything but a ConfigError that names it; a setting
    that is a string takes nothing else."""
    kind = str({field.name: field.type for field in attrs.fields(make)}[name])  # type: ignore[arg-type]
    for value in ODD:
        refusal = None
        try:
            made = make(**base | {name: value})
        except ConfigError as error:
            refusal = str(error)
        if refusal is not None:
            assert name in refusal
        else:
            assert kind != "str" or isinstance(getattr(made, name), str)


@pytest.mark.parametrize("names", [{}, [], None, 5, {5: None}, {"a": None}, {"a/b": None}])
def test_a_combined_connector_takes_a_mapping_to_connectors(names: Any) -> None:
    """Anything else is refused when it is made, not when its halves are."""
    with pytest.raises(ConfigError, match="connector"):
        MultiConnector(names)


@pytest.mark.parametrize("pool", [LRUBlockPool, NaiveBlockPool])
def test_pools_refuse_odd_sizes(pool: Callable[[Any, Any], Any]) -> None:
    """Both sizes of a pool are whole numbers."""
    for value in NO_COUNTS:
        with pytest.raises(ConfigError, match="num_blocks"):
            pool(value, 4)
        with pytest.raises(ConfigError, match="block_size"):
            pool(8, value)


def test_integers_of_numpy_are_integers() -> None:
    """Sizes are often read from arrays."""
    limits = Limits(max_num_seqs=np.int64(4), load_timeout_s=np.float32(2.0))
    assert limits.max_num_seqs == 4
    assert LRUBlockPool(np.int32(8), np.int16(4)).num_usable_blocks == 7
