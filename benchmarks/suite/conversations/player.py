"""Plays sessions to a live server in closed loops: a turn follows the answer that was read.

Sessions arrive whatever the server does, and each has one request under way at most. A rejected
turn is not sent again; the user continues with the next turn. Sessions that are programs (agents)
differ: each call names its program, a refused call is sent again, as clients do, and a program ends
when a call fails finally.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf, isfinite
from time import monotonic
from typing import Any

import msgspec

from benchmarks.suite.conversations.program_call import ProgramCall
from benchmarks.suite.conversations.sessions import Session, SessionTurn
from moonpool.distributions import percentiles
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.request_record import RequestRecord
from moonpool.trace.closed_loop import retry_after_s
from moonpool.types import RequestId, Slo
from moonpool_lab.replay.player import TURNED_AWAY
from moonpool_lab.replay.server import query_server
from moonpool_lab.replay.stream import CompletionReceiver

GRACE_S = 20.0
"""Seconds that the answers of requests under way may take, after the last request's TTFT SLO."""
MOST_TTFT_S = 120.0
"""The player waits for no TTFT SLO that is longer than this."""


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One request that was sent to the server. `sent_s` counts from the start of the run.
    `num_refused`: number of refused tries; `call`: the call of a program, which the record times
    from its first try on."""

    record: RequestRecord
    sent_s: float
    status: int  # HTTP status; 0 means no whole answer
    reason: str
    message: str = ""
    num_refused: int = 0
    call: ProgramCall | None = None


async def play_sessions(
    url: str,
    chains: Iterable[Sequence[Session]],
    slo: Slo,
    seconds: float,
    others: Sequence[str] = (),
    programs_s: float = 0.0,
) -> list[PlayedTurn]:
    """Plays the sessions of each chain one after another, and all chains at the same time.

    No request is sent after `seconds`. Requests under way may end until their SLOs are missed
    anyway. Unfinished sessions are cancelled and count as failed. With `others`, requests go in
    turn to `url` and to these servers. With `programs_s`, sessions are programs, and programs that
    have begun continue for at most that much longer. Raises ServerUnfitError.
    """
    client = HttpClient(url)
    facts = await query_server(client, None)
    clients = [client, *map(HttpClient, others)]
    run = _Run(cycle(clients), facts.model, slo, seconds, facts.config is not None, programs_s)
    tasks = [asyncio.create_task(run.chain(chain)) for chain in chains]
    last_s = run.began_s + seconds + (programs_s or GRACE_S)
    if isfinite(slo.ttft_s) and not programs_s:
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
        programs_s: float,
    ) -> None:
        self.played: list[PlayedTurn] = []
        self.began_s = monotonic()
        self._clients, self._slo, self._seconds = clients, slo, seconds
        self._model = model
        self._run_id = secrets.token_hex(4) if programs_s else ""
        self._num_programs = 0
        self._headers = b""
        if is_moonpool:
            ms = slo.ttft_s * 1e3, slo.tbt_s * 1e3
            self._headers = b"X-SLO-TTFT-ms: %g\r\nX-SLO-TPOT-ms: %g\r\n" % ms

    async def chain(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            await asyncio.sleep(max(session.started_s - self._now_s(), 0.0))
            number, self._num_programs = self._num_programs, self._num_programs + 1
            said: list[int] = []
            for step, turn in enumerate(session.turns):
                await asyncio.sleep(turn.think_s)
                goes_on = bool(self._run_id and step)
                if self._now_s() > self._seconds and not goes_on:
                    return
                call = None
                if self._run_id:
                    call = ProgramCall(number, step, step == len(session.turns) - 1)
                said += turn.new_tokens
                answer = await self._ask(said, turn, call)
                if call is not None and not answer:
                    break
                said += answer

    def _now_s(self) -> float:
        return monotonic() - self.began_s

    async def _ask(
        self, prompt: Sequence[int], turn: SessionTurn, call: ProgramCall | None
    ) -> list[int]:
        """Returns the answer, empty unless it is complete."""
        sent_s = self._now_s()
        name = RequestId(str(len(self.played)))
        record = RequestRecord(name, len(prompt), self._slo, self.began_s + sent_s)
        body = self._body(prompt, turn, call)
        receiver = CompletionReceiver(record)
        status, reason, num_refused = 0, "cancelled", 0
        try:
            while True:
                status, reason = await self._try(body, receiver)
                refused = call is not None and status in TURNED_AWAY
                num_refused += refused
                told_s = receiver.retry_after_s
                wait_s = retry_after_s(status, num_refused, told_s) if refused else None
                if wait_s is None:
                    break
                await asyncio.sleep(wait_s)
                receiver, status, reason = CompletionReceiver(record), 0, "cancelled"
        finally:
            record.finished_s = monotonic()
            record.outcome = reason
            text = receiver.error_message
            self.played.append(PlayedTurn(record, sent_s, status, reason, text, num_refused, call))
        return receiver.token_ids if status == 200 else []

    async def _try(self, body: bytes, receiver: CompletionReceiver) -> tuple[int, str]:
        """Returns the HTTP status, 0 without a whole answer, and how the try ended."""
        try:
            await next(self._clients).post("/v1/completions", body, receiver, self._headers)
        except ConnectionFailedError as error:
            receiver.error_message = str(error)
            return 0, "connection"
        receiver.on_end()
        if receiver.error_code:
            # An error within a stream has no status of its own.
            return (receiver.status if receiver.status != 200 else 0), receiver.error_code
        if not receiver.finish_reason:
            return 0, "broken_off"
        return receiver.status, receiver.finish_reason

    def _body(self, prompt: Sequence[int], turn: SessionTurn, call: ProgramCall | None) -> bytes:
        named = {}
        if call is not None:
            named["vllm_xargs"] = call.xargs(self._run_id, turn.answer_tokens)
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
            | named
        )


def run_figures(played: Sequence[PlayedTurn], seconds: float) -> dict[str, Any]:
    """Returns the figures of a run. Latencies are computed from whole answers only."""
    whole = [turn.record for turn in played if turn.status == 200]
    rejected = Counter(turn.reason for turn in played if turn.status in TURNED_AWAY)
    failed = Counter(
        f"{turn.reason} {turn.message}".strip().rpartition("\n")[2]  # of a stack trace, the error
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


def program_figures(played: Sequence[PlayedTurn]) -> dict[str, Any]:
    """Returns the figures of the programs that began. A program takes from the first sending of its
    first call to the end of its last answer. A program that did not finish takes infinitely long,
    so a quantile among these is None."""
    programs: dict[int, list[PlayedTurn]] = {}
    for turn in played:
        if turn.call is not None:
            programs.setdefault(turn.call.number, []).append(turn)
    took_s = [_makespan_s(turns) for turns in programs.values()]
    return {
        "begun": len(programs),
        "finished": sum(map(isfinite, took_s)),
        "calls": sum(map(len, programs.values())),
        "refusals": sum(turn.num_refused for turns in programs.values() for turn in turns),
        "makespan_s": {
            name: value if isfinite(value) else None for name, value in spread(took_s).items()
        },
    }


def _makespan_s(turns: Sequence[PlayedTurn]) -> float:
    for turn in turns:
        if turn.call is not None and turn.call.is_last and turn.status == 200:
            began_s = min(each.record.arrived_s for each in turns)
            return (turn.record.finished_s or began_s) - began_s
    return inf


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns P50 and P90; zeros without values."""
    return percentiles(values, 50, 90)
