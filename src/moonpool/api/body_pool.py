"""Reads bodies: small ones at once, large ones in processes that the head's loop does not wait for.

There is one process for large bodies and one for huge ones, so that a huge body delays few others.
Each serves the tenants in turn. What waits is bounded and keeps its deadline. A body that takes too
long ends with its process, and the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

import msgspec

from moonpool.api.body_process import LENGTH, BodyResult, BodyStart, BodyWork, Kind, unpack
from moonpool.api.errors import ApiError
from moonpool.api.frontend import ApiOptions, ModelCard, ModelFrontend, RequestRefused
from moonpool.api.grammars.check import GrammarCheck
from moonpool.api.preparation import PreparedCall, Preparer
from moonpool.api.turns import FairTurns

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 10
HUGE_BYTES = 2 << 20
STREAM_BYTES = 1 << 20
_DONE = msgspec.msgpack.Decoder(BodyResult)


class BodyReader:
    """Reads the bodies of one server's calls. `close` ends its processes."""

    def __init__(self, frontend: ModelFrontend, options: ApiOptions) -> None:
        self._frontend = frontend
        self._preparer = Preparer(frontend.tokenizer, frontend.card, options)
        self._options = options
        self._large = _Lane()
        self._huge = _Lane()
        self._grammars = GrammarCheck()

    async def call(self, kind: Kind, raw: bytes, tenant: str, timeout_s: float) -> PreparedCall:
        """Returns a checked call. Raises `ApiError` and `RequestRefused`."""
        began_s = self._frontend.now()
        if self._is_small(raw):
            call = await getattr(self._preparer, kind)(raw)
            assert isinstance(call, PreparedCall)
        else:
            call = unpack(kind, await self._run(kind, raw, tenant, timeout_s))
        if call.grammar:
            left_s = began_s + timeout_s - self._frontend.now()
            await self._grammars.require(call.grammar_field, call.grammar, tenant, left_s)
        return call

    async def respond(self, kind: Kind, raw: bytes, tenant: str, timeout_s: float) -> bytes:
        """Returns a whole response, of an endpoint that generates nothing. Raises as `call`."""
        if self._is_small(raw):
            found = await getattr(self._preparer, kind)(raw)
            assert isinstance(found, bytes)
            return found
        return (await self._run(kind, raw, tenant, timeout_s)).response

    def _is_small(self, raw: bytes) -> bool:
        """Whether the body is read in this process, from now on by the present card."""
        if self._preparer.card is not self._frontend.card:
            self._preparer.use(self._frontend.card)
        return len(raw) <= LARGE_BYTES or not self._options.tokenizer

    def close(self) -> None:
        self._large.close()
        self._huge.close()
        self._grammars.close()

    async def _run(self, kind: Kind, raw: bytes, tenant: str, timeout_s: float) -> BodyResult:
        lane = self._huge if len(raw) > HUGE_BYTES else self._large
        start = _start_of(self._preparer.card, self._options)
        work = msgspec.msgpack.encode(BodyWork(kind=kind, raw=raw))
        try:
            async with asyncio.timeout(timeout_s):
                done = _DONE.decode(await lane.run(tenant, start, work))
        except TimeoutError:
            text = "the request's deadline passed while its body was read"
            raise RequestRefused(504, "deadline", text) from None
        if done.error is not None:
            raise done.error.as_error()
        return done


def _start_of(card: ModelCard, options: ApiOptions) -> bytes:
    start = BodyStart(
        parent_pid=os.getpid(),
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        vocab_size=card.vocab_size,
        card=card,
        served_names=tuple(options.served_names),
        max_choices=options.max_choices,
        max_logprobs=options.max_logprobs,
    )
    return msgspec.msgpack.encode(start)


class _Lane:
    """One process, and the bodies that wait for it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._start = b""
        self._turns = FairTurns("large bodies wait to be read", "too_many_large_bodies")
        self._closed = False

    async def run(self, tenant: str, start: bytes, work: bytes) -> bytes:
        """Returns the reply. A process that ended is replaced once. Raises ApiError."""
        async with self._turns.turn(tenant):
            for is_last in (False, True):
                try:
                    return await self._exchange(start, work)
                except (OSError, asyncio.IncompleteReadError) as error:
                    self._end_process()
                    logger.warning("the process that reads large bodies ended: %r", error)
                    if is_last:
                        break
                except BaseException:
                    self._end_process()  # it may be in the middle of this body
                    raise
        text = (
            "The body could not be read: the process that reads large bodies ended twice."
            " Send the request again."
        )
        raise ApiError(text, status=500, code="internal_error")

    def close(self) -> None:
        self._closed = True
        self._end_process()

    async def _exchange(self, start: bytes, work: bytes) -> bytes:
        process = await self._ready(start)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(work)))
        process.stdin.write(work)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(length)

    async def _ready(self, start: bytes) -> asyncio.subprocess.Process:
        """Returns the process; a new one if it has ended or the model's card has changed."""
        if self._closed:
            text = "The server is stopping. Send the request again."
            raise RequestRefused(503, "server_stopping", text, 5.0)
        process = self._process
        if process is not None and process.returncode is None and self._start == start:
            return process
        self._end_process()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "moonpool.api.body_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=STREAM_BYTES,
            start_new_session=True,
        )
        self._start = start
        assert process.stdin is not None
        process.stdin.write(LENGTH.pack(len(start)) + start)
        return process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
