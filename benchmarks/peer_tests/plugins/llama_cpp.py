"""Keeps llama.cpp's tests from fetching models. Their own hook, LLAMA_SERVER_BIN_PATH, names the
program that they start."""

from __future__ import annotations

import importlib


def pytest_collection_finish() -> None:
    importlib.import_module("utils").ServerPreset.load_all = lambda: None
