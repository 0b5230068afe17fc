"""Tests that state can be written and read again: values, shared objects, and classes that are not
allowed."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.conductor import Conductor
from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.config.tables import ConductorConfig
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.rewind.snapshot import SnapshotError, dump, load
from moonpool.types import InstanceId, Role, Slo

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
KEYS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
VALUES = st.recursive(
    KEYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=4))
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    (found,) = load(dump([value]))
    assert found == value
    assert type(found) is type(value)


def test_what_is_shared_stays_shared() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    base = np.arange(12, dtype=np.int64).reshape(3, 4)
    found = load(dump({"a": inner, "b": (inner, Role.DECODE), "rows": base, "row": base[1, ::2]}))
    assert found["a"] is found["b"][0] and found["a"][1] is found["a"]
    assert found["b"][1] is Role.DECODE
    found["rows"][1, 2] = 99
    assert found["row"].tolist() == [4, 99]


def test_objects_of_the_package_come_back() -> None:
    mean = RunningMean(2.5)
    counter = count(7)
    next(counter)
    found = load(dump([mean, mean, Slo(ttft_s=1.0, tbt_s=2.0), counter, Counter("aab"), range(3)]))
    assert found[0] is found[1] and found[0].value == 2.5
    assert found[2] == Slo(ttft_s=1.0, tbt_s=2.0)
    assert next(found[3]) == 8
    assert found[4:] == [Counter("aab"), range(3)]


def test_who_watches_a_conductor_is_not_stored() -> None:
    """An observer belongs to its process and cannot be stored, so a process that reads the state
    has no observer."""
    conductor = Conductor(ConductorConfig())
    seen: list[object] = []
    conductor.watch(seen.append)
    found: Conductor = load(dump(conductor))
    assert found.requests == {}
    found.watch(seen.append)
    assert isinstance(load(dump(found)), Conductor)


def test_an_index_stays_valid() -> None:
    index = PrefixIndex()
    # more than 64 instances, so that masks need more than 64 bits
    names = [InstanceId(f"i{number}") for number in range(70)]
    for name in names:
        index.add_instance(name, 1, 100)
        index.apply(name, 1, 0, tuple(bytes([number]) * 16 for number in range(3)), (), ())
    found: PrefixIndex = load(dump(index))
    found.validate()
    assert found.holders_of(b"\1" * 16) == index.holders_of(b"\1" * 16)


class Stranger:
    """A class of a module that is not allowed."""


def test_strangers_are_refused() -> None:
    with pytest.raises(SnapshotError, match="cannot be stored"):
        dump([Stranger()])
    data = dump([Stranger()], extra=[Stranger])
    with pytest.raises(SnapshotError, match="not allowed"):
        load(data)
    assert isinstance(load(data, extra=[Stranger])[0], Stranger)


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "moonpool.config.tables:sys"])
def test_functions_from_elsewhere_are_never_called(name: str) -> None:
    for node in (["global", name], ["struct", name, {}], ["object", name, {}], ["enum", name, "x"]):
        with pytest.raises(SnapshotError):
            load(msgspec.msgpack.encode([node]))


@given(st.binary(max_size=64), st.integers(0, 1 << 20))
def test_damaged_bytes_are_one_error(noise: bytes, place: int) -> None:
    data = bytearray(dump({"a": [1, (2, 3)], "b": np.arange(4), "c": Slo(ttft_s=1.0, tbt_s=1.0)}))
    place %= len(data)
    data[place : place + len(noise)] = noise
    with suppress(SnapshotError):
        load(bytes(data))
