"""Refuses grammars that cannot be compiled, or only with too much time, memory or stack.

A separate process compiles them first, because some would end the process that compiles them
(`check_process`). The results are kept, so that a schema which many calls share is compiled once.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from moonpool.api.frontend import RequestRefused
from moonpool.api.grammars.check_process import TOO_COMPLEX, TOO_LONG, read_frame, write_frame
from moonpool.api.sharing.shared_buffer import oldest_of_most
from moonpool.api.structured_output import unusable
from moonpool.api.turns import FairTurns

MAX_KEPT = 1024
REPLY_S = 60.0
_OF_THE_GRAMMAR = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU}


class GrammarCheck:
    """The grammars of one server's calls. `close` ends its process."""

    def __init__(self) -> None:
        self._troubles: OrderedDict[bytes, str] = OrderedDict()  # longest unused first
        self._parties: dict[bytes, str] = {}  # who asked first
        self._turns = FairTurns("grammars wait to be compiled", "too_many_grammars")
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._compiler = _Compiler()

    async def require(self, field: str, grammar: str, party: str, timeout_s: float) -> None:
        """`party`: as in `SharedBuffer`. Raises `ApiError` if the grammar in `field` cannot be
        used, and `RequestRefused` if it was not compiled in time."""
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        trouble = self._troubles.get(key)
        if trouble is None:
            try:
                async with asyncio.timeout(timeout_s), self._turns.turn(party):
                    loop = asyncio.get_running_loop()
                    trouble = await loop.run_in_executor(
                        self._thread, self._compiler.trouble_of, grammar
                    )
            except TimeoutError:
                text = "the request's deadline passed while its grammar was compiled"
                raise RequestRefused(504, "deadline", text) from None
        self._keep(key, trouble, party)
        if trouble:
            raise unusable(field, trouble, grammar)

    def _keep(self, key: bytes, trouble: str, party: str) -> None:
        self._troubles[key] = trouble
        self._troubles.move_to_end(key)
        self._parties.setdefault(key, party)
        if len(self._troubles) > MAX_KEPT:
            gone = oldest_of_most((each, self._parties[each], 1) for each in self._troubles)
            del self._troubles[gone], self._parties[gone]

    def close(self) -> None:
        self._compiler.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Compiler:
    """One process, used by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def trouble_of(self, grammar: str) -> str:
        """Returns why the grammar cannot be used; "" if it can. Raises `RequestRefused`."""
        for _ in range(2):
            process = self._ready()
            reply = _exchange(process, grammar.encode())
            if reply is not None:
                return reply.decode()
            process.kill()
            status = process.wait()
            if status == -signal.SIGXCPU:
                return TOO_LONG
            if -status in _OF_THE_GRAMMAR:
                return TOO_COMPLEX
        text = "The grammar could not be compiled. Send the request again later."
        raise RequestRefused(503, "grammar_not_compiled", text, 5.0)

    def close(self) -> None:
        self._closed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RequestRefused(
                503, "server_stopping", "The server is stopping. Send the request again.", 5.0
            )
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "moonpool.api.grammars.check_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what llguidance writes there before it ends
                start_new_session=True,
            )
        return self._process


def _exchange(process: subprocess.Popen[bytes], frame: bytes) -> bytes | None:
    """Returns the reply; None if the process has ended or does not reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write_frame(process.stdin, frame)
    except OSError:
        return None
    if not select.select([process.stdout], [], [], REPLY_S)[0]:
        return None
    return read_frame(process.stdout)
