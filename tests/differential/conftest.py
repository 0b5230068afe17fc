"""Gives torch one thread, for speed on a busy machine, and chooses the kernels to test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.differential.plans import EXACT_OPS, OPS_NAMES, usable_ops

MOST_TELLING = ("in_a_crowd[native-float32-7]", "in_a_crowd[native-int8-bfloat16-7]", "own_cache")
"""Lists the ways of a request that `make test` covers in each dtype."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Chooses the tests of `make test`. The kernels are always tested; the plain operations, their
    slow reference, are tested in the long run. Ways of a request are always tested in bfloat16. The
    other dtypes are tested in the long run, except on the ways in MOST_TELLING.
    """
    for item in list(items):
        if "differential" not in item.path.parts:
            continue
        path = "test_paths" in item.path.name and not item.name.count("native-bfloat16")
        if "reference" in item.name:
            item.add_marker(pytest.mark.long)
        elif "test_speculation" in item.path.name and "native-bfloat16" not in item.name:
            if "in_a_crowd" not in item.name:
                item.add_marker(pytest.mark.long)
        elif path and "-many" not in item.name and not any(p in item.name for p in MOST_TELLING):
            items.remove(item)  # because the long run has this test with many prompts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=EXACT_OPS)
def ops_name(request: pytest.FixtureRequest) -> str:
    return usable_ops(request)


@pytest.fixture(params=OPS_NAMES)
def each_ops_name(request: pytest.FixtureRequest) -> str:
    return usable_ops(request)
