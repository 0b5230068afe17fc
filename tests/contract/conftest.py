from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from messenger_harness import Node, need_nixl

from moonpool.log_limit import LogLimit
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer import slice_copier as copiers


@pytest.fixture(autouse=True)
def every_line_is_logged() -> None:
    """Counts the limit on equal log lines from zero in each test."""
    for limit in logging.getLogger("moonpool_engine.transfer.listener").filters:
        if isinstance(limit, LogLimit):
            limit.forget()


@pytest.fixture(params=["shm", "tcp", pytest.param("tls", marks=pytest.mark.long), "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        need_nixl()
    return str(request.param)


@pytest.fixture(params=["plain", "native"])
def slice_copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that copies and hashes slices."""
    monkeypatch.setattr(copiers, "FEW_SLICES", 0)
    if request.param == "native" and open_slices() is None:
        pytest.skip("the kernels are not built here")
    return str(request.param)


@pytest.fixture
def make_node(transport: str, slice_copier: str) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str, **options: Any) -> Node:
        native = slice_copier == "native" and "checksum" not in options
        nodes.append(Node(name, transport, native=native, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
