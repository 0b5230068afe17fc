"""What the tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.api import body_pool
from moonpool.api.grammars.check import GrammarCheck


class SharedCheck(GrammarCheck):
    """Outlives the applications that use it."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def one_grammar_check() -> Iterator[None]:
    """All applications use one process that compiles grammars: each start would take as long as
    many tests. `test_grammar_bombs` has processes of its own."""
    shared = SharedCheck()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_pool, "GrammarCheck", lambda: shared)
        yield
    GrammarCheck.close(shared)
