"""Settings of all tests."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator

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
    """A file leaves nothing behind that slows all later tests of its process. Benchmarks tune their
    process, which is set back; what traces must have ended."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.set_threshold(*_GC_THRESHOLD)
        gc.enable()
        traces = tracemalloc.is_tracing() or sys.getprofile() is not _PROFILE
        assert not traces, f"{item.path.name} leaves tracemalloc or a profiler running"
    return result


_SWITCH_INTERVAL_S = sys.getswitchinterval()
_GC_THRESHOLD = gc.get_threshold()
_PROFILE = sys.getprofile()
