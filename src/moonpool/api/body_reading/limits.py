"""Limits the CPU time and memory that reading one body may take, and makes the errors for a body
that takes more.

Chat templates and tokenizers come with a model: a text may make them take any time and memory. The
time is CPU time, so that a busy machine ends nothing. At the limit, Python code is interrupted, and
the process continues. Code that does not return to Python ends with its process: the parent sees
that it still computes, and RLIMIT_CPU would end it, too. A shared memory page tells what the
process was doing.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import resource
import signal
from collections.abc import Iterator
from enum import IntEnum
from types import FrameType
from typing import Any

from moonpool.api.errors import ApiError

BASE_S = 2.0
BYTES_PER_S = 256 << 10
"""Bytes of a body per second of allowed CPU time; tokenizers need at most a fourth of that time."""
LOAD_S = 60.0
LOAD_BYTES = 4 << 30
"""Memory for the tokenizer itself."""
BASE_BYTES = 512 << 20
BYTES_PER_BYTE = 64
"""Memory for each byte of a body, in addition to the tokenizer's."""
AGAIN_S = 0.05
"""How often the signal of a limit is repeated, in case some code has caught it."""


class ReadStage(IntEnum):
    """What a process that reads bodies is doing now."""

    OTHER = 0
    TEMPLATE = 1
    TOKENIZER = 2


class StageNote:
    """The present stage, in a page of shared memory."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    def set(self, stage: ReadStage) -> None:
        self._page[0] = stage

    @property
    def stage(self) -> ReadStage:
        return ReadStage(self._page[0])

    def close(self) -> None:
        self._page.close()


class LimitReachedError(BaseException):
    """Interrupts work that takes too long. Not an `Exception`, so that `except Exception` does not
    catch it."""


class CallLimits:
    """Sets the limits of this process. Use this class in the main thread."""

    def __init__(self) -> None:
        self._is_armed = False
        self._own_bytes = _address_bytes()
        signal.signal(signal.SIGPROF, self._on_time)

    def settle(self) -> None:
        """Takes the memory in use now as the base, so that only growth counts from here on."""
        self._own_bytes = _address_bytes()

    @property
    def has_room(self) -> bool:
        """Whether earlier calls have given back most of their memory."""
        return _address_bytes() - self._own_bytes < BASE_BYTES // 2

    @contextlib.contextmanager
    def within(self, seconds: float, num_bytes: int) -> Iterator[None]:
        """A context in which this much CPU time and further memory may be used. Raises
        `LimitReachedError` and MemoryError."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        last_s = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
        _lower(resource.RLIMIT_CPU, last_s)
        if self._own_bytes:
            _lower(resource.RLIMIT_AS, self._own_bytes + num_bytes)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
        try:
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_time(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            raise LimitReachedError


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, hard))


def _address_bytes() -> int:
    """Returns the process's address space, or 0 if the kernel does not report it, in which case
    memory is not limited."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


def body_s(num_bytes: int) -> float:
    """Returns the CPU seconds that a body of this size may take."""
    return BASE_S + num_bytes / BYTES_PER_S


def body_bytes(num_bytes: int) -> int:
    """Returns the bytes of memory that a body may take."""
    return BASE_BYTES + BYTES_PER_BYTE * num_bytes


_PARAMS = {
    "completion": "prompt",
    "tokenize": "prompt",
    "embeddings": "input",
    "pooling": "input",
    "responses": "input",
}
_REMEDY = "Send another one, or shorten it."
_TEMPLATE_REMEDY = "Send other messages, or start the server with --chat-template FILE."


def limit_error(kind: str, stage: ReadStage, what: str) -> ApiError:
    """Returns the error for a body of this kind. `what`: the end of the error text, such as "takes
    more than 2 s"."""
    param: Any = _PARAMS.get(kind, "messages")
    if stage is ReadStage.TEMPLATE:
        text = f"The model's chat template {what} for these messages. {_TEMPLATE_REMEDY}"
        return ApiError(text, param=param, code="chat_template_error")
    if stage is ReadStage.TOKENIZER:
        text = f"The model's tokenizer {what} for this text. {_REMEDY}"
        return ApiError(text, param=param, code="tokenizer_error")
    return ApiError(f"Reading this body {what}. {_REMEDY}", code="body_too_complex")


def too_long(kind: str, stage: ReadStage, seconds: float) -> ApiError:
    return limit_error(kind, stage, f"takes more than {seconds:.3g} s of CPU time")


def too_large(kind: str, stage: ReadStage) -> ApiError:
    return limit_error(kind, stage, "needs too much memory")


def ended_twice(kind: str, stage: ReadStage) -> ApiError:
    return limit_error(kind, stage, "ended its process twice")
