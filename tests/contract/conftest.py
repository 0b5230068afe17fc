from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from messenger_harness import Node, need_nixl


@pytest.fixture(params=["shm", "tcp", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        need_nixl()
    return str(request.param)


@pytest.fixture
def make_node(transport: str) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str, **options: Any) -> Node:
        nodes.append(Node(name, transport, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
