"""How many data-parallel ranks listed vLLM servers have. The servers are asked repeatedly, because
an elastic server (`/scale_elastic_ep`) has other ranks later."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence

from moonpool.discovery.endpoint import MAX_RANKS, Endpoint, Notice
from moonpool.http_client.client import ConnectionFailedError, HttpClient, TooLargeError
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.discovery")

LOOK_S = 2.0
ASK_S = 5.0
AT_ONCE = 16
MAX_METRICS_BYTES = 16 << 20
_ENGINE = re.compile(r'^vllm:cache_config_info\{(?:[^\n]*,)?engine="(\d+)"', re.M)


def engines_in(metrics: str) -> tuple[str, ...]:
    """The engines that `/metrics` names, one for each rank behind its address, in their order. A
    server on the second machine of several counts on where the first one ends."""
    return tuple(sorted(set(_ENGINE.findall(metrics)), key=int))


class RankCounts:
    """The numbers of ranks that the servers stated last."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}  # by address
        self._notice = Notice(log)

    def ranks_of(self, server: Endpoint) -> Sequence[Endpoint] | None:
        """Returns the ranks of a listed server, or None if the server has not yet stated how many
        it has."""
        if server.num_ranks:
            return server.ranks()
        found = self._found.get(server.address)
        return None if found is None else server.ranks(found)

    async def follow(
        self, listed: Callable[[], Iterable[Endpoint]], changed: Callable[[], None]
    ) -> None:
        """Asks the `listed` servers whose ranks no source states, until cancelled."""
        gate = asyncio.Semaphore(AT_ONCE)
        while True:
            asked = sorted({each.address for each in listed() if not each.num_ranks})
            counts = await asyncio.gather(*(_count(address, gate) for address in asked))
            # A server that does not answer now keeps the ranks that it had.
            pairs = zip(asked, counts, strict=True)
            found = {at: count or self._found.get(at) for at, count in pairs}
            before = self._found
            self._found = {at: min(count, MAX_RANKS) for at, count in found.items() if count}
            if self._found != before:
                changed()
            silent = [at for at in asked if at not in self._found]
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            self._notice.say(f"waiting for the ranks of {silent[0]}{more}" if silent else "")
            await asyncio.sleep(LOOK_S)


async def _count(address: str, gate: asyncio.Semaphore) -> int:
    """Returns how many ranks a server has: 0 if it does not answer, and 1 for another server than
    vLLM."""
    async with gate:
        http = HttpClient(f"http://{address}", connect_s=ASK_S)
        try:
            async with asyncio.timeout(ASK_S), http.stream("GET", "/metrics") as response:
                body = await response.read(MAX_METRICS_BYTES)
                if response.status >= 500:  # the server's state while it is being scaled
                    return 0
                return max(len(engines_in(body.decode(errors="replace"))), 1)
        except (ConnectionFailedError, TooLargeError, TimeoutError):
            return 0
        finally:
            http.close()
