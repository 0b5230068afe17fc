"""Settings of all tests."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# No example may fail because the machine is busy. A property that names no number of examples has
# half as many in `make test` as in `make long`, which repeats it.
settings.register_profile("short", deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=100)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if _is_long(config) else "short")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if _is_long(config) else ():
        test = getattr(item, "obj", None)
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        own = own or getattr(getattr(item, "cls", None), "settings", settings.default)
        repeats = own.max_examples == settings.default.max_examples
        if repeats and getattr(test, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.long)


def _is_long(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "long")


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
