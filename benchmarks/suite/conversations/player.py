"""Plays sessions to a live server in closed loops: a turn follows the answer that was read.

Sessions arrive whatever the server does, and each has one request under way at most. A rejected
turn is not sent again; the user goes on with the next one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from time import monotonic
from typing import Any

import msgspec

from benchmarks.suite.conversations.sessions import Session, SessionTurn
from moonpool.distributions.quantiles import percentiles
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId, Slo
from moonpool_lab.replay.player import TURNED_AWAY
from moonpool_lab.replay.server import query_server
from moonpool_lab.replay.stream import CompletionReceiver

GRACE_S = 20.0
"""Seconds that the answers of requests under way may take, after the last request's TTFT SLO."""
MOST_TTFT_S = 120.0
"""TTFT SLOs above this are not waited for."""


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One request that was sent. `sent_s` counts from the start of the run."""

    record: RequestRecord
    sent_s: float
    status: int  # 0: no whole answer
    reason: str
    message: str = ""


async def play_sessions(
    url: str,
    chains: Iterable[Sequence[Session]],
    slo: Slo,
    seconds: float,
    others: Sequence[str] = (),
) -> list[PlayedTurn]:
    """Plays each chain's sessions one after the other, and all chains at once.

    No request is sent after `seconds`. Requests under way may end until their SLOs are missed
    anyway. The others are cancelled and count as failed. With `others`, requests go to `url` and to
    them in turn. Raises ServerUnfitError.
    """
    client = HttpClient(url)
    facts = await query_server(client, None)
    clients = [client, *map(HttpClient, others)]
    run = _Run(cycle(clients), facts.model, slo, seconds, facts.config is not None)
    tasks = [asyncio.create_task(run.chain(chain)) for chain in chains]
    last_s = run.began_s + seconds + GRACE_S
    if isfinite(slo.ttft_s):
        last_s += min(slo.ttft_s, MOST_TTFT_S)
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=last_s - monotonic())
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
    finally:
        for each in clients:
            each.close()
    return run.played


class _Run:
    def __init__(
        self,
        clients: Iterator[HttpClient],
        model: str,
        slo: Slo,
        seconds: float,
        is_moonpool: bool,
    ) -> None:
        self.played: list[PlayedTurn] = []
        self.began_s = monotonic()
        self._clients, self._slo, self._seconds = clients, slo, seconds
        self._model = model
        self._headers = b""
        if is_moonpool:
            ms = slo.ttft_s * 1e3, slo.tbt_s * 1e3
            self._headers = b"X-SLO-TTFT-ms: %g\r\nX-SLO-TPOT-ms: %g\r\n" % ms

    async def chain(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            await asyncio.sleep(max(session.started_s - self._now_s(), 0.0))
            said: list[int] = []
            for turn in session.turns:
                await asyncio.sleep(turn.think_s)
                if self._now_s() > self._seconds:
                    return
                said += turn.new_tokens
                said += await self._ask(said, turn)

    def _now_s(self) -> float:
        return monotonic() - self.began_s

    async def _ask(self, prompt: Sequence[int], turn: SessionTurn) -> list[int]:
        """Returns the answer, empty unless it is complete."""
        sent_s = self._now_s()
        name = RequestId(str(len(self.played)))
        record = RequestRecord(name, len(prompt), self._slo, self.began_s + sent_s)
        receiver = CompletionReceiver(record)
        status, reason = 0, "cancelled"
        try:
            await next(self._clients).post(
                "/v1/completions", self._body(prompt, turn), receiver, self._headers
            )
            receiver.on_end()
            status, reason = receiver.status, receiver.finish_reason
            if receiver.error_code:
                # An error within a stream has no status of its own.
                status, reason = (status if status != 200 else 0), receiver.error_code
            elif not reason:
                status, reason = 0, "broken_off"
        except ConnectionFailedError as error:
            status, reason, receiver.error_message = 0, "connection", str(error)
        finally:
            record.finished_s = monotonic()
            record.outcome = reason
            text = receiver.error_message
            self.played.append(PlayedTurn(record, sent_s, status, reason, text))
        return receiver.token_ids if status == 200 else []

    def _body(self, prompt: Sequence[int], turn: SessionTurn) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": turn.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )


def run_figures(played: Sequence[PlayedTurn], seconds: float) -> dict[str, Any]:
    """Figures of a run. Latencies are those of whole answers."""
    whole = [turn.record for turn in played if turn.status == 200]
    rejected = Counter(turn.reason for turn in played if turn.status in TURNED_AWAY)
    failed = Counter(
        f"{turn.reason} {turn.message}".strip()
        for turn in played
        if turn.status != 200 and turn.status not in TURNED_AWAY
    )
    effective = sum(record.effective for record in whole)
    prompt_tokens = sum(record.num_prompt_tokens for record in whole)
    hits = sum(record.cached_tokens for record in whole)
    return {
        "requests": len(played),
        "completed": len(whole),
        "effective": effective,
        "goodput_rps": effective / seconds,
        "rejected": rejected.total(),
        "rejected_by_reason": dict(rejected),
        "failed": failed.total(),
        "errors": dict(failed.most_common(5)),
        "missed_ttft": sum((r.ttft_s or 0.0) > r.slo.ttft_s for r in whole),
        "missed_tbt": sum((r.tbt_top10_mean_s or 0.0) > r.slo.tbt_s for r in whole),
        "prompt_tokens": prompt_tokens,
        "hit_ratio": hits / prompt_tokens if prompt_tokens else 0.0,
        "ttft_s": spread([record.ttft_s or 0.0 for record in whole]),
        "tbt_s": spread([gap_s for record in whole for gap_s in record.gaps_s]),
        "tbt_top10_mean_s": spread([record.tbt_top10_mean_s or 0.0 for record in whole]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """P50 and P90; zeros without values."""
    return percentiles(values, 50, 90)
