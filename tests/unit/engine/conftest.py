"""Holds fixtures for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moonpool_engine.engine.parallel import process_group
from tests.forked.commands import begin_peer


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Gives torch one thread, which is fast on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def forked_peers() -> Iterator[None]:
    """Forks the processes of stages and ranks: new interpreters would take several times as long as
    the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "begin_spare", begin_peer)
        yield
