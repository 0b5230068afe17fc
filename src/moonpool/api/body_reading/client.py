"""The head's end of one process that reads bodies (`body_process`). Several calls may be in the
process, which reads them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import msgspec

from moonpool.api import body_process
from moonpool.api.body_process import BodyReady, BodyResult, BodyStart, BodyWork, UseCard
from moonpool.api.body_reading.limits import LOAD_BYTES, LOAD_S, ReadStage, StageNote
from moonpool.api.helpers.forked import ForkedHelper, fork_helper
from moonpool.api.helpers.process import HelperEndedError, HelperProcess
from moonpool.api.serving_backend import ModelCard
from moonpool.link.packets import anonymous_file

MODULE = "moonpool.api.body_process"
_encode = msgspec.msgpack.Encoder().encode
_RESULT = msgspec.msgpack.Decoder(BodyResult)
_READY = msgspec.msgpack.Decoder(BodyReady)


class BodyProcessEndedError(Exception):
    """The process ended while reading this call. `took_too_long`: whether the call took more CPU
    time than it may."""

    def __init__(self, stage: ReadStage, took_too_long: bool) -> None:
        super().__init__(stage, took_too_long)
        self.stage = stage
        self.took_too_long = took_too_long


class NotReadError(Exception):
    """The process ended before it reached this call, or skipped the call in favour of other
    tenants."""


@dataclass(frozen=True, slots=True)
class ForkedReader:
    """A process that waits for a `BodyStart`, and its `StageNote`. `fork_reader` makes it."""

    helper: ForkedHelper
    note_fd: int

    def close(self) -> None:
        """Ends a process that was not given to a `BodyClient`."""
        self.helper.close()
        os.close(self.note_fd)


def fork_reader() -> ForkedReader | None:
    """Forks a process that will read bodies, so that it need not import again what this process has
    imported. Returns None if forking is not possible. Must be called before the process has an
    event loop, or any secret."""
    note_fd = _open_note()
    helper = fork_helper(
        lambda parent_pid: body_process.main(parent_pid, note_fd),
        f"{sys.executable} -m {MODULE}",
        _ENVIRONMENT,
        [note_fd],
    )
    if helper is None:
        os.close(note_fd)
        return None
    return ForkedReader(helper, note_fd)


def _open_note() -> int:
    """Raises OSError."""
    fd = anonymous_file("moonpool stage")
    os.ftruncate(fd, os.sysconf("SC_PAGESIZE"))
    return fd


class BodyClient:
    """One process. Call `begin` and wait for it, then `read`; `end` ends the process."""

    def __init__(self, started: BodyStart, forked: ForkedReader | None = None) -> None:
        """`forked`: the process, if it already runs."""
        self._started = started
        self._forked = forked
        self._starting: asyncio.Task[str] | None = None
        self._card: ModelCard | None = None
        self._note: StageNote | None = None
        self._stage = ReadStage.OTHER
        helper = None if forked is None else forked.helper
        self._process = HelperProcess(MODULE, _ENVIRONMENT, self._on_end, helper)

    def begin(self) -> asyncio.Task[str]:
        """Starts the process. The result of the returned task says why the tokenizer or the chat
        template cannot be used, or is "" if both can."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        return self._starting

    async def _start(self) -> str:
        note_fd = -1
        try:
            note_fd = _open_note() if self._forked is None else self._forked.note_fd
            self._note = StageNote(note_fd)
            words, first = (str(note_fd),), _encode(self._started)
            return _READY.decode(await self._process.start(first, LOAD_S, words, (note_fd,))).error
        except OSError as error:
            self._process.end()
            return f"no process can be started: {error}"
        except HelperEndedError as ended:
            return "" if ended.status is None else _why_not_ready(ended.status)
        finally:
            if note_fd >= 0:
                os.close(note_fd)

    @property
    def is_ready(self) -> bool:
        return self._process.is_ready

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def read(self, work: BodyWork, card: ModelCard) -> BodyResult:
        """Reads a body with the limits and names of this model card. Raises `BodyProcessEndedError`
        and `NotReadError`."""
        process = self._process
        if process.has_ended:
            raise NotReadError
        if card is not self._card:
            self._card = card
            process.tell(_encode(UseCard(card)))
        work = msgspec.structs.replace(work, num_replies=process.num_replies)
        try:
            result = _RESULT.decode(await process.ask(_encode(work), work.limit_s))
        except HelperEndedError as ended:
            if ended.is_of_the_work:
                raise BodyProcessEndedError(self._stage, ended.took_too_long) from None
            raise NotReadError from None
        if result.was_left:
            raise NotReadError
        return result

    def end(self) -> None:
        """Ends the process. Bodies that are in the process count as unread."""
        self._process.end()

    def _on_end(self) -> None:
        if self._note is not None:
            self._stage = self._note.stage
            self._note.close()


_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # the process tokenises one text at a time
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each further arena takes address space, which is limited
    "RUST_BACKTRACE": "0",
}


def _why_not_ready(status: int) -> str:
    if status in (0, -signal.SIGXCPU, -signal.SIGKILL):
        how = f"takes more than {LOAD_S:g} s or {LOAD_BYTES >> 30} GiB to load"
    else:
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        how = f"ends the process that loads it ({name}): it is damaged, or needs too much memory"
    return (
        f"the model's tokenizer or chat template {how}; use another model, or --chat-template FILE"
    )
