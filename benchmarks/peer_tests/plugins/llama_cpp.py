"""Keeps llama.cpp's tests from fetching models, and tells the server their model's name. The tests'
own hook, LLAMA_SERVER_BIN_PATH, names the program that they start."""

from __future__ import annotations

import importlib
import inspect
import os
import re

import pytest

NAME = "PEER_TESTS_NAME"
"""Environment variable with the name that the server gives its model; if empty, the server's flags
name it."""
_ASKED = re.compile(r"""\bmodel["']?\s*[=:]\s*["']([^"']+)["']""")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests as the suite's own tests.sh does."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="marked as slow"), append=False)


def pytest_collection_finish() -> None:
    importlib.import_module("utils").ServerPreset.load_all = lambda: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """llama-server answers to any model's name, while moonpool only answers to the names that it
    serves."""
    test = getattr(item, "function", None)
    asked = _ASKED.search(inspect.getsource(test)) if test else None
    os.environ[NAME] = asked.group(1) if asked else ""
