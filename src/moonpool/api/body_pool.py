"""Reads bodies. A small body that only moonpool's own code reads is read immediately, and all
others in processes, so that the head's loop does not wait.

A model's chat template and its tokenizer come from outside. So both run in a process with limits on
time and memory, which reads many small bodies at a time. There is one process for large bodies and
one for huge ones, so that a huge body delays few others. Each process serves the parties (see
`SharedBuffer`) in turn. The queue is bounded and keeps deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from moonpool.api.body_process import (
    BYTE_TOKENIZER,
    LARGE_BYTES,
    BodyError,
    BodyResult,
    BodyStart,
    BodyWork,
    Kind,
    unpack,
)
from moonpool.api.body_reading.client import BodyClient, BodyProcessEndedError, NotReadError
from moonpool.api.body_reading.limits import body_s, ended_twice, too_long
from moonpool.api.errors import ApiError
from moonpool.api.grammars.check import GrammarCheck
from moonpool.api.helpers.process import Helper
from moonpool.api.preparation import PreparedCall, Preparer
from moonpool.api.serving_backend import ApiOptions, ModelBackend, ModelCard, RequestRefused
from moonpool.api.turns import MAX_WAITING, FairTurns
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.head")

HUGE_BYTES = 2 << 20
SMALL_AT_A_TIME = 64
"""Number of small bodies that are sent to their process at a time, so that it never waits for the
head's loop."""
MOST_SMALL_WAITING = 16_384
"""The most small bodies that may wait, which is also the limit of connections."""
TRY_AGAIN_S = 10.0
"""Time between two processes that failed to load the tokenizer."""
MOST_HALVINGS = 3


class BodyReader:
    """Reads the bodies of one server's calls. `close` ends its processes."""

    def __init__(
        self, backend: ModelBackend, options: ApiOptions, first: BodyClient | None = None
    ) -> None:
        """`first`: a process that has loaded the tokenizer already."""
        self._backend = backend
        self._preparer = Preparer(backend.tokenizer, backend.card, options)
        self._options = options
        vocab_size = backend.card.vocab_size
        starts = [body_start(options, vocab_size, yields) for yields in (False, True)]
        self._small = BodyWorker(starts[0], SMALL_AT_A_TIME, MOST_SMALL_WAITING, first)
        self._large, self._huge = BodyWorker(starts[1]), BodyWorker(starts[1])
        self._grammars = GrammarCheck()

    async def call(self, kind: Kind, raw: bytes, party: str, timeout_s: float) -> PreparedCall:
        """Returns a checked call. Raises `ApiError` and `RequestRefused`."""
        began_s = self._backend.now()
        if self._reads_here(raw):
            call = await getattr(self._preparer, kind)(raw)
            assert isinstance(call, PreparedCall)
        else:
            call = unpack(kind, await self._run(kind, raw, party, timeout_s))
        if call.grammar:
            left_s = began_s + timeout_s - self._backend.now()
            await self._grammars.require(call.grammar_field, call.grammar, party, left_s)
        return call

    async def respond(self, kind: Kind, raw: bytes, party: str, timeout_s: float) -> bytes:
        """Returns a whole response, of an endpoint that generates nothing. Raises the same errors
        as `call`."""
        if self._reads_here(raw):
            found = await getattr(self._preparer, kind)(raw)
            assert isinstance(found, bytes)
            return found
        return (await self._run(kind, raw, party, timeout_s)).response

    def _reads_here(self, raw: bytes) -> bool:
        """Whether the body is read in this process; uses the present card for later bodies."""
        if self._preparer.card is not self._backend.card:
            self._preparer.use(self._backend.card)
        if not self._options.tokenizer:
            return True
        return len(raw) <= LARGE_BYTES and not is_foreign(self._options)

    def close(self) -> None:
        for lane in (self._small, self._large, self._huge):
            lane.close()
        self._grammars.close()

    async def _run(self, kind: Kind, raw: bytes, party: str, timeout_s: float) -> BodyResult:
        lane = self._huge if len(raw) > HUGE_BYTES else self._large
        if len(raw) <= LARGE_BYTES:
            lane = self._small
        try:
            async with asyncio.timeout(timeout_s):
                done = await lane.read(party, kind, raw, self._preparer.card)
        except TimeoutError:
            text = "the request's deadline passed while its body was read"
            raise RequestRefused(504, "deadline", text) from None
        if done.error is not None:
            raise done.error.as_error()
        if done.fault:
            log.error("a body could not be read:\n%s", done.fault)
            text = "Internal error. The server's log has its cause."
            raise ApiError(text, status=500, code="internal_error")
        return done


def is_foreign(options: ApiOptions) -> bool:
    """Whether the tokenizer or chat template in use is not moonpool's own."""
    return options.tokenizer != BYTE_TOKENIZER or bool(options.chat_template)


def body_start(options: ApiOptions, vocab_size: int, yields: bool = False) -> BodyStart:
    """Returns what a process needs to know before it reads bodies. `yields`: whether it yields to
    running answers when cores are scarce."""
    return BodyStart(
        tokenizer=options.tokenizer,
        parts=options.tokenizer_parts,
        chat_template=options.chat_template,
        vocab_size=vocab_size,
        served_names=tuple(options.served_names),
        max_choices=options.max_choices,
        max_logprobs=options.max_logprobs,
        yields=yields,
    )


class BodyWorker:
    """One process, and the bodies that wait for this process."""

    def __init__(
        self,
        start: BodyStart,
        places: int = 1,
        most_waiting: int = MAX_WAITING,
        first: BodyClient | None = None,
    ) -> None:
        """`places`: how many bodies are in the process at a time. `first`: see `BodyReader`."""
        self._helper = Helper(lambda: BodyClient(start), first)
        self._shares = places > 1
        self._turns = FairTurns(
            "bodies wait to be read", "too_many_large_bodies", places, most_waiting
        )
        self._starting = asyncio.Lock()
        self._trouble, self._tried_s = "", 0.0
        self._patience = Patience()

    async def read(self, party: str, kind: Kind, raw: bytes, card: ModelCard) -> BodyResult:
        """Reads a body. If the process ends while reading it, another process tries once more; a
        second end, or a limit, becomes the error of the result. Raises ApiError (500) if no process
        can read bodies, and RequestRefused (503) if too many bodies wait or the server stops."""
        num_ended = 0
        while True:
            async with self._patience.turn(party), self._turns.turn(party):
                limit_s = self._patience.of(party, len(raw))
                work = BodyWork(kind=kind, raw=raw, party=party, limit_s=limit_s)
                try:
                    result = await self._read(work, card)
                except NotReadError:
                    continue
                except BodyProcessEndedError as ended:
                    num_ended += 1
                    if not ended.took_too_long and num_ended == 1:
                        log.warning("a process that reads bodies ended; another one reads on")
                        continue
                    error = ended_twice(kind, ended.stage)
                    if ended.took_too_long:
                        error = too_long(kind, ended.stage, limit_s)
                    result = BodyResult(error=BodyError.of(error), was_exhausted=True)
                self._patience.note(party, result.was_exhausted)
                if result.was_exhausted and result.error is not None:
                    log.warning("a call%s: %s", party and f" of {party}", result.error.message)
                return result

    async def _read(self, work: BodyWork, card: ModelCard) -> BodyResult:
        process = await self._ready()
        try:
            return await process.read(work, card)
        except asyncio.CancelledError:
            if not self._shares:
                process.end()  # the process may be in the middle of this body, which may be large
            raise

    def close(self) -> None:
        self._helper.close()

    async def _ready(self) -> BodyClient:
        """Returns the process, or a new one if it has ended, once it is ready. Raises ApiError,
        `RequestRefused`."""
        process = self._helper.process
        if process is not None and process.is_ready:
            return process
        async with self._starting:
            return await self._started()

    async def _started(self) -> BodyClient:
        is_early = time.monotonic() - self._tried_s < TRY_AGAIN_S
        if self._helper.is_up or not self._trouble or not is_early:
            process, self._tried_s = self._helper.current(), time.monotonic()
            self._trouble = await asyncio.shield(process.begin())
            if not self._trouble:
                return process
            process.end()
        text = f"The body cannot be read: {self._trouble}"
        raise ApiError(text, status=500, code="internal_error")


class Patience:
    """How long a party's bodies may take: the time is halved after each body that took too much
    time or memory, down to an eighth, and doubled after each body that did not. Until the party has
    its full time again, its bodies are read one by one. So these bodies cost other parties
    little."""

    def __init__(self) -> None:
        self._halvings: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        """Returns the number of parties whose time is reduced."""
        return len(self._halvings)

    def of(self, party: str, num_bytes: int) -> float:
        """Returns the CPU seconds for a body of this size."""
        seconds: float = body_s(num_bytes) / 2 ** self._halvings.get(party, 0)
        return seconds

    @contextlib.asynccontextmanager
    async def turn(self, party: str) -> AsyncIterator[None]:
        lock = self._locks.get(party)
        if lock is None:
            yield
            return
        async with lock:
            yield

    def note(self, party: str, was_exhausted: bool) -> None:
        before = self._halvings.get(party, 0)
        after = min(before + 1, MOST_HALVINGS) if was_exhausted else before - 1
        if after > 0:
            self._halvings[party] = after
            self._locks.setdefault(party, asyncio.Lock())
        elif before:
            del self._halvings[party], self._locks[party]
