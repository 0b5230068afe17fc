"""Settings of all tests."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# No example may fail because the machine is busy.
settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collection need not look at modules and tests, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A test leaves nothing behind that slows all later tests of its process."""
    result = yield
    module_ends = nextitem is None or nextitem.path != item.path
    assert not module_ends or _process_wide() == _AT_START, (
        f"{item.path.name} changes settings of the whole process: {_process_wide()}"
    )
    return result


def _process_wide() -> dict[str, Any]:
    return {
        "tracemalloc": tracemalloc.is_tracing(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "switch interval": sys.getswitchinterval(),
        "profile": sys.getprofile(),
    }


_AT_START = _process_wide()
