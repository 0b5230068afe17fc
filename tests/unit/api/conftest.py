"""Holds fixtures that the tests of the API share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from moonpool.api import body_pool
from moonpool.api.grammars.check import GrammarCheck


class SharedCheck:
    """A helper process that outlives the applications that use it, and their event loops."""

    def __init__(self) -> None:
        self._check = GrammarCheck()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def require(self, field: str, grammar: str, party: str, timeout_s: float) -> None:
        asked = self._check.require(field, grammar, party, timeout_s)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    def close(self) -> None:
        """Leaves the process to the next application."""

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._check.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session", autouse=True)
def one_grammar_check() -> Iterator[None]:
    """Lets all applications use one process that compiles grammars, because the start of such a
    process takes as long as many tests. `test_grammar_bombs` has processes of its own."""
    shared = SharedCheck()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_pool, "GrammarCheck", lambda: shared)
        yield
    shared.end()
