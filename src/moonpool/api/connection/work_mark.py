"""Which call the head's loop works on at this moment, in memory that outlives the head.

A call may hang the loop, or end the process. Then the mark names it, and the other calls under way
are known to be innocent. It is set before each step of a call's own work, and cleared after it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Coroutine, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from moonpool.link.anonymous_file import anonymous_file

T = TypeVar("T")


class MarkedStep(NamedTuple):
    """`number`: the number of the kept call. `since_s`: a time of the machine's monotonic clock."""

    number: int
    since_s: float


class WorkMark:
    """Set by the head's loop, read by its supervisor."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._page).cast("q")  # the call's number plus 1, and the time

    @staticmethod
    def make_memory() -> int:
        """A file in memory for one mark, which the caller owns."""
        fd = anonymous_file("moonpool work")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def set(self, number: int) -> None:
        """Marks that the loop works on the kept call of this number."""
        words = self._words
        words[1] = time.monotonic_ns()
        words[0] = number + 1

    def clear(self) -> None:
        self._words[0] = 0

    @property
    def number(self) -> int | None:
        """The number of the call that the event loop is processing."""
        return self._words[0] - 1 if self._words[0] else None

    def back_to(self, number: int | None) -> None:
        """Marks the earlier work again."""
        if number is None:
            self._words[0] = 0
        elif self._words[0] != number + 1:
            self.set(number)

    def read(self) -> MarkedStep | None:
        """The call that the loop was processing when it ended; None if there was none."""
        number, since_ns = self._words[0], self._words[1]
        return MarkedStep(number - 1, since_ns / 1e9) if number else None

    def close(self) -> None:
        self._words.release()
        self._page.close()


class MarkedCall(Protocol):
    """Whose work is marked."""

    mark: WorkMark | None

    @property
    def number(self) -> int | None:
        """Under which it is kept; None if no other head goes on with it."""


def marked(work: Coroutine[Any, Any, T], call: MarkedCall | None) -> Coroutine[Any, Any, T]:
    """The work with its steps marked, where that is possible."""
    if call is None or call.mark is None:
        return work
    return _run_marked(work, call)


async def _run_marked(work: Coroutine[Any, Any, T], call: MarkedCall) -> T:
    found: T = await MarkedWork(work, call)
    return found


class MarkedWork:
    """`await MarkedWork(work, call)` runs a coroutine whose steps are marked."""

    __slots__ = ("_call", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], call: MarkedCall) -> None:
        self._work = work
        self._call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        work, call, mark = self._work, self._call, self._call.mark
        assert mark is not None
        step: Any = work.send
        given: Any = None
        while True:
            number = call.number
            if number is not None:
                mark.set(number)
            try:
                waits_for = step(given)
            except StopIteration as done:
                return done.value
            finally:
                mark.clear()
            try:
                given = yield waits_for
                step = work.send
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                step, given = work.throw, error
