"""Refuses grammars that cannot be compiled, or need too much time, memory or stack.

A separate process compiles them first, because some grammars end the process that compiles them
(`check_process`). The results are kept, so that a schema which many calls share is compiled once.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections import OrderedDict

from moonpool.api.grammars.check_process import TOO_COMPLEX, TOO_LONG
from moonpool.api.helpers.process import Helper, HelperEndedError, HelperProcess
from moonpool.api.serving_backend import RequestRefused
from moonpool.api.sharing.shared_buffer import oldest_of_most
from moonpool.api.structured_output import unusable
from moonpool.api.turns import FairTurns

MAX_KEPT = 1024
MODULE = "moonpool.api.grammars.check_process"
STUCK_CPU_S = 12.0
"""CPU time after which the server ends the process. The process ends itself long before that,
unless it is stuck."""
_OF_THE_GRAMMAR = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}


class GrammarCheck:
    """Checks the grammars of one server's calls. `close` ends the checking process."""

    def __init__(self) -> None:
        # the party that first asked about each grammar
        self._troubles: OrderedDict[bytes, str] = OrderedDict()
        self._parties: dict[bytes, str] = {}  # the party that asked first
        self._turns = FairTurns("grammars wait to be compiled", "too_many_grammars")
        self._helper = Helper(lambda: HelperProcess(MODULE))

    async def require(self, field: str, grammar: str, party: str, timeout_s: float) -> None:
        """`party`: the tenant or address, as in `SharedBuffer`. Raises `ApiError` if the grammar in
        `field` cannot be used, and `RequestRefused` if it was not compiled in time."""
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        trouble = self._troubles.get(key)
        if trouble is None:
            try:
                async with asyncio.timeout(timeout_s), self._turns.turn(party):
                    trouble = await self._trouble_of(grammar)
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
        self._helper.close()

    async def _trouble_of(self, grammar: str) -> str:
        """Returns why the grammar cannot be used, or "" if it can. Raises `RequestRefused`."""
        for _ in range(2):
            process = self._helper.current()
            try:
                if not process.is_ready:
                    await process.start(b"", STUCK_CPU_S)
                return (await process.ask(grammar.encode(), STUCK_CPU_S)).decode()
            except OSError:
                break  # no process could be started
            except HelperEndedError as ended:
                if ended.is_of_the_work and ended.took_too_long:
                    return TOO_LONG
                if ended.is_of_the_work and ended.status in _OF_THE_GRAMMAR:
                    return TOO_COMPLEX
        text = "The grammar could not be compiled. Send the request again later."
        raise RequestRefused(503, "grammar_not_compiled", text, 5.0)
