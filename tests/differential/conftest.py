"""One thread for torch, for speed on a busy machine; and the kernels to test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.differential.plans import EXACT_OPS, OPS_NAMES, missing


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The kernels are tested each time, and the plain operations, which they are compared with and
    which are slow, in the long run. Ways of a request are tested each time in bfloat16, and those
    that tell a dtype apart least (TCP, odd chunks) in the other dtypes in the long run."""
    for item in items:
        if "differential" not in item.path.parts:
            continue
        other = "test_paths" in item.path.name and not item.name.count("native-bfloat16")
        rare = any(part in item.name for part in ("tcp", "-1]", "-50]", "int8-shm"))
        if "reference" in item.name or (other and rare):
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=EXACT_OPS)
def ops_name(request: pytest.FixtureRequest) -> str:
    why = missing(request.param)
    if why is not None:
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(params=OPS_NAMES)
def each_ops_name(request: pytest.FixtureRequest) -> str:
    why = missing(request.param)
    if why is not None:
        pytest.skip(why)
    return str(request.param)
