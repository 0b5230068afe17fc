"""Starts clusters of real processes. The tests of a module share them where possible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer

MODEL = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=128,vocab=300"
SMALL = ["--kv-tokens", "8192", "--block-size", "16", "--max-num-batched-tokens", "128"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalServer]:
    """Serves a small random model with 2 prefill and 2 decode instances."""
    with LocalServer([MODEL, "--prefill", "2", "--decode", "2", *SMALL]) as server:
        yield server


@pytest.fixture(scope="session")
def http(cluster: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def children_of(pid: int, kind: str) -> list[int]:
    """Returns the processes that the instance `pid` has started: its `stage`s or its `rank`s."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").split()
        except OSError:
            continue
        if int(parent) == pid and kind.encode() in command:
            children.append(int(folder.name))
    return children
