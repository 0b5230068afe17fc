"""Calls that end processes: no call may end more than two, regardless of who sends it again.

A call may hang the head's loop, or end the process. A mark in memory that outlives the head names
the call that the loop works on at this moment, so the other calls under way are known to be
innocent. The mark is set before each step of a call's own work, and cleared after the step.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from moonpool.api.errors import NO_RETRY, ApiError
from moonpool.link.packets import anonymous_file

MAX_ENDED = 2
"""Most heads, and most instances, that one call may end."""
INSTANCES_ENDED = "instances_ended"
"""The reason of a refusal because of instances. Calls like this one are refused at once."""
REMEMBERED_S = 600.0
MAX_REMEMBERED = 256


def poison_error() -> ApiError:
    """Returns an error after which client libraries do not send the call again, as they would after
    other errors of this status."""
    text = (
        f"This request, or one like it, has ended processes of the server {MAX_ENDED} times, so it"
        " is not tried again. Tell the server's operator: its log names the request."
    )
    return ApiError(text, status=500, code="head_failed", headers=(NO_RETRY,))


def late_error() -> ApiError:
    text = "the request's deadline passed while the server's head process was replaced"
    return ApiError(text, status=504, code="deadline")


def send_error(sock: socket.socket, error: ApiError, payload: bytes, request_id: str = "") -> None:
    """Sends the error to a client that has received nothing yet, and closes the connection."""
    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
    fields += [*error.headers, (b"connection", b"close")]
    if request_id:
        fields.append((b"x-request-id", request_id.encode()))
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, _WORDS[error.status])
    try:
        sock.send(status + head + b"\r\n" + payload)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the client has left
    sock.close()


_WORDS = {500: b"Internal Server Error", 504: b"Gateway Timeout"}


class Enders:
    """How many processes calls have ended, by tenant and by the digest of path and body."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()

    def note(self, tenant: str, digest: bytes, count: int, since_s: float) -> None:
        """Sets how many processes such calls have ended, and the time of the last end. If there are
        too many entries, the oldest is forgotten."""
        self._counts[tenant, digest] = count, since_s
        self._counts.move_to_end((tenant, digest))
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)

    def count(self, tenant: str, digest: bytes) -> int:
        """Returns how many processes such calls have ended within the last minutes."""
        count, since_s = self._counts.get((tenant, digest), (0, 0.0))
        return count if self._now() - since_s < REMEMBERED_S else 0


T = TypeVar("T")


class MarkedStep(NamedTuple):
    """`number`: the number of the kept call. `since_s`: a time of the machine's monotonic clock."""

    number: int
    since_s: float


class WorkMark:
    """Set by the head's loop, read by its supervisor."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._page).cast("q")  # number of the call plus 1, and the time

    @staticmethod
    def make_memory() -> int:
        """Makes a file in memory for one mark, which the caller owns."""
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
        """Returns the number of the call that the event loop is processing, or None."""
        return self._words[0] - 1 if self._words[0] else None

    def back_to(self, number: int | None) -> None:
        """Marks the earlier work again."""
        if number is None:
            self._words[0] = 0
        elif self._words[0] != number + 1:
            self.set(number)

    def read(self) -> MarkedStep | None:
        """Returns the call that the loop was processing when it ended, or None."""
        number, since_ns = self._words[0], self._words[1]
        return MarkedStep(number - 1, since_ns / 1e9) if number else None

    def close(self) -> None:
        self._words.release()
        self._page.close()


class MarkedCall(Protocol):
    """A call whose work is marked."""

    mark: WorkMark | None

    @property
    def number(self) -> int | None:
        """Returns the number under which the call is kept, or None if no other head can continue
        it."""


def marked(work: Coroutine[Any, Any, T], call: MarkedCall | None) -> Coroutine[Any, Any, T]:
    """Returns the work with its steps marked, if that is possible."""
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
