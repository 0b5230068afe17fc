"""Tests keys and places of SGLang's pages in a pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moonpool_engine.sglang.page_store import (
    KEY_BYTES,
    PageStore,
    Piece,
    namespace_of,
    page_key,
    pieces_of,
)


def test_keys_differ_by_all_that_matters() -> None:
    parts: list[list[str | int | bool | None]] = [
        ["model", 0, 2],
        ["model", 1, 2],
        ["model", 0, 12],
        ["model", 0, 2, ""],
        ["model0", 0, 2],
        ["model", "0", 2],
        ["model", False, 2],
        ["model", None, 2],
    ]
    namespaces = {namespace_of(part) for part in parts}
    assert len(namespaces) == len(parts)
    keys = {
        page_key(namespace, pool, page_hash)
        for namespace in namespaces
        for pool in ("kv", "mamba", "kvm")
        for page_hash in ("a" * 64, "b" * 64, "amba")
    }
    assert len(keys) == len(namespaces) * 9
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_pieces_are_those_of_each_page() -> None:
    assert pieces_of(2, [10, 20, 30, 40], [1, 2, 3, 4]) == [[(10, 1), (20, 2)], [(30, 3), (40, 4)]]
    for wrong in ((2, [1, 2, 3], [1, 1, 1]), (1, [1], [1, 2]), (0, [], []), (3, [1, 2], [1, 1])):
        with pytest.raises(ValueError, match="pages"):
            pieces_of(*wrong)


class Failing:
    """Plays a pool that has died."""

    def exists(self, keys: Sequence[bytes]) -> int:
        raise ConnectionError("gone")

    def get(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        return [True]  # one value for several keys, as if the answer were to another question

    def put(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        raise OSError("gone")

    def close(self) -> None:
        raise OSError("gone")


def test_a_pool_that_fails_is_a_miss() -> None:
    store = PageStore(Failing(), {"kv": b"n"})
    assert store.leading("kv", ["a", "b"]) == 0
    assert store.get("kv", ["a", "b"], [[], []]) == [False, False]
    assert store.put("kv", ["a", "b"], [[], []]) == [False, False]
    assert store.counts["pages_missed"] == store.counts["pages_dropped"] == 2
    store.close()
