"""One rate on a live server: a trace replayed at that speed, and what share met both SLOs.

Owns no search (`bench.capacity`). Runs follow each other: a replay ends when its last answer has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moonpool.plan.confidence import Attainment
from moonpool.replay.connection import HttpClient
from moonpool.replay.run import ReplayPlan, run_replay
from moonpool.replay.server import ServerFacts, ServerUnfitError, ask_server
from moonpool.trace.resample import resample
from moonpool.trace.row import TraceRow


class LiveCapacity:
    """The server's own SLOs hold unless others are given; moonpool is told those."""

    def __init__(
        self,
        url: str,
        rows: Sequence[TraceRow],
        block_tokens: int,
        slo_ttft_s: float | None = None,
        slo_tbt_s: float | None = None,
    ) -> None:
        self._url = url
        self._rows = rows
        self._block_tokens = block_tokens
        self._slo = (slo_ttft_s, slo_tbt_s)
        self._num_runs = 0

    def check(self) -> int:
        """Asks the server whether it is there, and leaves out what is too long for it; returns how
        many requests that are. Raises ServerUnfitError, ValueError."""
        most = asyncio.run(self._ask()).max_model_tokens
        if most is None:
            return 0
        kept = [row for row in self._rows if row.input_tokens + row.output_tokens <= most]
        num_long = len(self._rows) - len(kept)
        if len(kept) < 2:
            raise ServerUnfitError(
                f"all requests are longer than the {most} tokens that {self._url} takes: scale"
                " them down with --scale-tokens, such as 1/16"
            )
        self._rows = kept
        return num_long

    async def _ask(self) -> ServerFacts:
        client = HttpClient(self._url)
        try:
            return await ask_server(client, None)
        finally:
            client.close()

    def measure(self, speed: float, seed: int) -> Attainment:
        """Raises ServerUnfitError, HopelessError, ValueError: the server is gone, or nothing that
        is asked of it can succeed."""
        self._num_runs += 1
        ttft_s, tbt_s = self._slo
        plan = ReplayPlan(
            url=self._url,
            rows=tuple(row.faster(speed) for row in resample(self._rows, seed)),
            block_tokens=self._block_tokens,
            slo_ttft_s=ttft_s,
            slo_tbt_s=tbt_s,
            seed=self._num_runs,  # other tokens, or each run would find the cache of the one before
        )
        figures = asyncio.run(run_replay(plan))
        if figures["interrupted"]:
            raise KeyboardInterrupt
        if not figures["completed"] and figures["errors"]:
            why = next(iter(figures["errors"]))
            raise ServerUnfitError(f"all {figures['requests']} requests failed; {why}")
        return Attainment(figures["requests"], figures["effective"])
