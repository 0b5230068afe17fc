"""Holds the settings of all tests."""

from __future__ import annotations

import gc
import os
import ssl
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from hypothesis import settings

# No example may fail because the machine is busy. A property has a third as many examples in `make
# test` as in `make long`, which repeats the test. A property that names a smaller number has that
# number in `make test`.
settings.register_profile("short", deadline=None, max_examples=33)
settings.register_profile("long", deadline=None, max_examples=100)

MANY_EXAMPLES = 10
"""A property that names a smaller number of examples keeps that number."""
PATIENCE_S = 120.0

# Threads of OpenMP and OpenBLAS wait for each other in a loop, which takes the cores from other
# processes of tests. Libraries read these variables when they are loaded, and no library is loaded
# yet.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if _is_long(config) else "short")
    trust_one_authority()
    be_patient()


def be_patient() -> None:
    """httpx gives up after 5 s by default, and a server on a busy machine may take longer."""
    usual = (httpx.Client.__init__.__kwdefaults__ or {})["timeout"]
    usual.connect = usual.read = usual.write = usual.pool = PATIENCE_S


def trust_one_authority() -> None:
    """Without this change, each client of httpx reads all certificate authorities of this machine,
    which takes 20 ms: longer than most calls of tests. No test calls a server with a certificate of
    these authorities."""
    bundles = {certifi.where(), os.environ.get("SSL_CERT_FILE", "")}
    end, make_context = b"-----END CERTIFICATE-----\n", ssl.create_default_context
    _AUTHORITY.write(Path(certifi.where()).read_bytes().partition(end)[0] + end)
    _AUTHORITY.flush()

    def make_quickly(*args: Any, cafile: Any = None, **more: Any) -> ssl.SSLContext:
        return make_context(*args, cafile=_AUTHORITY.name if cafile in bundles else cafile, **more)

    ssl.create_default_context = make_quickly


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shortened: set[int] = set()
    usual: Any = settings.default
    for item in items:
        test = getattr(item, "obj", None)
        if not getattr(test, "is_hypothesis_test", False):
            continue
        holder, name = getattr(item, "function", test), "_hypothesis_internal_use_settings"
        if not hasattr(holder, name):  # a test that is one step of a state machine
            holder, name = getattr(item, "cls", None), "settings"
        own: Any = getattr(holder, name, usual)
        is_default = own.max_examples == usual.max_examples
        if not is_default and own.max_examples < MANY_EXAMPLES:
            continue
        if _is_long(config):
            item.add_marker(pytest.mark.long)
        elif not is_default and id(holder) not in shortened and not item.get_closest_marker("long"):
            shortened.add(id(holder))  # the parameters of one test share these limits
            setattr(holder, name, settings(own, max_examples=own.max_examples // 3))


def _is_long(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "long")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes modules and tests from garbage collection, because they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Undoes what a test file left behind that would slow all later tests of its process.
    Benchmarks tune their process, so their tuning is undone. No trace may still be active."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.set_threshold(*_GC_THRESHOLD)
        gc.enable()
        traces = tracemalloc.is_tracing() or sys.getprofile() is not _PROFILE
        assert not traces, f"{item.path.name} leaves tracemalloc or a profiler running"
    return result


_AUTHORITY = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 - until the process ends
_SWITCH_INTERVAL_S = sys.getswitchinterval()
_GC_THRESHOLD = gc.get_threshold()
_PROFILE = sys.getprofile()
