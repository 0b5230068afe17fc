"""Plays a trace to a live server in an open loop: at the trace's times, however slow the answers.

Calls of programs (agents) are an exception: each call is sent when the calls before it have ended
and its tools have run, and is sent again if it is refused.

Times count from a request's arrival in the trace. A client that cannot keep up therefore makes its
own figures worse and reports it (`late_s`, `num_delayed`); it does not hide the server's queue.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from string import ascii_letters, digits, punctuation
from time import monotonic
from urllib.parse import quote

import msgspec

from moonpool.config.slo import SloClass, SloConfig
from moonpool.distributions import Histogram
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.request_record import RequestRecord
from moonpool.sim.metrics import Collector
from moonpool.sim.programs import ProgramFigures
from moonpool.trace.closed_loop import ClosedLoop, retry_after_s
from moonpool.trace.row import TraceRow
from moonpool.types import RequestId, Slo
from moonpool_lab.replay.prompts import PromptMaker
from moonpool_lab.replay.stream import CompletionReceiver

TURNED_AWAY = (422, 429, 503)
WORTH_RETRYING = (429, 503)
UNSERVABLE_STATUSES = (401, 403, 404, 405)
"""Status codes that every other request would get, too."""
MAX_NAME = 256
"""Characters of a program's name in a header."""
_IN_HEADERS = (ascii_letters + digits + punctuation).replace("%", "")


class UnservableError(Exception):
    """No request can succeed; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Options of how to play a trace. `send_slo`: whether to send the SLO to a moonpool server with
    each request; the SLO of a class is always sent. `slo_classes`: the classes that rows may name.
    `retries`: how often a rejected request is sent again, each time after the server's
    Retry-After."""

    model: str
    slo: Slo
    slo_classes: SloConfig = field(default_factory=SloConfig)
    send_slo: bool = False
    concurrency: int = 1024
    retries: int = 0
    timeout_s: float = 600.0


class Player:
    """One run of a trace: call `play` once, then read the attributes."""

    def __init__(self, client: HttpClient, prompts: PromptMaker, options: PlayOptions) -> None:
        self.collector = Collector()
        self.late_s = Histogram()
        self.errors: Counter[str] = Counter()
        self.num_delayed = 0
        self.num_resent = 0
        self.num_unfinished = 0
        self.peak_in_flight = 0
        self.prompt_tokens = 0
        self.last_arrival_s = 0.0
        self.last_end_s = 0.0
        self.interrupted = False
        self._client = client
        self._prompts = prompts
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._gate = asyncio.Semaphore(options.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._unservable: str | None = None
        self.programs = ProgramFigures(prompts.block_tokens)
        self._calls: ClosedLoop[TraceRow] = ClosedLoop()
        self._numbers: dict[str, int] = {}  # numbers of the calls that wait for others
        self._head = _body_head(options.model)
        self._headers = _slo_headers(options.slo) if options.send_slo else b""

    async def play(self, rows: Iterable[TraceRow], on_end: Callable[[], None]) -> None:
        """Sends all requests and waits until all have ended; calls `on_end` when a request has
        ended.

        After a call of `stop`, requests in flight are cancelled. Raises UnservableError.
        """
        began_s = monotonic()
        for number, row in enumerate(rows):
            if row.call:
                if self._calls.drops(row):
                    continue
                self.programs.read(row, monotonic())
                wait_s = self._calls.add(row)
                if wait_s != 0.0:
                    self._numbers[row.call] = number
                    if wait_s is not None:
                        self._start_following(row, began_s, on_end)
                    continue
            body = self._body(row, number)
            if await self._stopped_before(began_s + row.arrived_s):
                break
            if self._gate.locked():
                self.num_delayed += 1
            await self._gate.acquire()
            if self._stopped.is_set():
                break
            self._send(number, body, row, began_s, began_s + row.arrived_s, on_end)
            self.last_arrival_s = row.arrived_s
        stopping = asyncio.create_task(self._stopped.wait())
        while self._tasks and not self._stopped.is_set():
            await asyncio.wait([*self._tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        given_up = [*self._tasks]
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        if self._unservable is not None:
            raise UnservableError(self._unservable)

    def stop(self) -> None:
        """Ends the run and keeps its figures so far."""
        self.interrupted = True
        self._stopped.set()

    async def _stopped_before(self, at_s: float) -> bool:
        left_s = at_s - monotonic()
        if left_s <= 0:
            await asyncio.sleep(0)
            return self._stopped.is_set()
        try:
            async with asyncio.timeout(left_s):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    def _class_of(self, row: TraceRow) -> SloClass | None:
        return self._options.slo_classes.class_of(row.slo_class, row.tenant)

    def _send(
        self,
        number: int,
        body: bytes,
        row: TraceRow,
        began_s: float,
        due_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self.late_s.add(max(monotonic() - due_s, 0.0))
        slo_class = self._class_of(row)
        slo = self._options.slo if slo_class is None else slo_class.slo
        record = RequestRecord(RequestId(str(number)), row.input_tokens, slo, due_s)
        task = self._loop.create_task(self._one(record, body, row, began_s, on_end))
        self._tasks.add(task)
        self.peak_in_flight = max(self.peak_in_flight, len(self._tasks))

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._gate.release()
            self.last_end_s = monotonic() - began_s
            if task.cancelled():
                self.num_unfinished += 1
            on_end()

        task.add_done_callback(end)

    async def _one(
        self,
        record: RequestRecord,
        body: bytes,
        row: TraceRow,
        began_s: float,
        on_end: Callable[[], None],
    ) -> None:
        slo_class = self._class_of(row)
        headers = self._headers if slo_class is None else _slo_headers(slo_class.slo)
        if row.call:
            self.programs.begin(row, record.arrived_s)
            headers += program_headers(row)
        for attempt in count(1):
            receiver = CompletionReceiver(record)
            status, reason = await self._request(receiver, body, headers)
            wait_s = None if record.gap_runs else self._wait_s(row, status, attempt, receiver)
            if wait_s is None:
                break
            self.num_resent += 1
            await asyncio.sleep(wait_s)
        record.finished_s = monotonic()
        record.outcome = reason
        if status in UNSERVABLE_STATUSES and not self.collector.num_completed:
            self._unservable = f"the server answers {status}: {receiver.error_message or reason}"
            self._stopped.set()
        self._note(record, receiver, status, reason, "" if slo_class is None else slo_class.name)
        if row.call:
            self._end_call(row, record, began_s, on_end)

    def _wait_s(
        self, row: TraceRow, status: int, num_tries: int, receiver: CompletionReceiver
    ) -> float | None:
        """Returns how long to wait before a refused request is sent again, or None if it is not
        sent again."""
        if row.call:
            self.programs.num_retries += 1
            wait_s = retry_after_s(status, num_tries, receiver.retry_after_s)
            self.programs.num_retries -= wait_s is None
            return wait_s
        if status not in WORTH_RETRYING or num_tries > self._options.retries:
            return None
        return receiver.retry_after_s or 1.0

    def _end_call(
        self, row: TraceRow, record: RequestRecord, began_s: float, on_end: Callable[[], None]
    ) -> None:
        """Ends a call of a program, and sends the calls that waited only for this call."""
        dropped = self._calls.num_dropped
        if record.outcome in ("stop", "length"):
            for following in self._calls.end(row.call):
                self._start_following(following, began_s, on_end)
        else:
            self._calls.give_up(row.call)
        dropped = self._calls.num_dropped - dropped
        self.programs.end(row, record, row.hash_ids, monotonic(), dropped)

    def _start_following(self, row: TraceRow, began_s: float, on_end: Callable[[], None]) -> None:
        task = self._loop.create_task(self._follow(row, began_s, on_end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, row: TraceRow, began_s: float, on_end: Callable[[], None]) -> None:
        """Sends a call of a program after the run time of its tools."""
        number = self._numbers.pop(row.call)
        due_s = monotonic() + row.delay_s
        body = self._body(row, number)
        await asyncio.sleep(max(due_s - monotonic(), 0.0))
        await self._gate.acquire()
        self._send(number, body, row, began_s, due_s, on_end)

    async def _request(
        self, receiver: CompletionReceiver, body: bytes, headers: bytes
    ) -> tuple[int, str]:
        """Returns the HTTP status and the finish reason, or the error code where there is none."""
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._client.post("/v1/completions", body, receiver, headers)
        except TimeoutError:
            receiver.error_message = f"no complete answer within {self._options.timeout_s:g} s"
            return 0, "timeout"
        except ConnectionFailedError as error:
            receiver.error_message = str(error)
            return 0, "connection"
        receiver.on_end()
        if receiver.error_code:
            # An error in the middle of a stream has no status of its own.
            return receiver.status if receiver.status != 200 else 0, receiver.error_code
        if not receiver.finish_reason:
            receiver.error_message = "the stream ended without a finish reason"
            return 0, "broken_off"
        return 200, receiver.finish_reason

    def _note(
        self,
        record: RequestRecord,
        receiver: CompletionReceiver,
        status: int,
        reason: str,
        slo_class: str,
    ) -> None:
        collector = self.collector
        if status == 200 and record.first_token_s is not None:
            record.num_generated_tokens = receiver.completion_tokens or record.num_generated_tokens
            self.prompt_tokens += receiver.prompt_tokens or record.num_prompt_tokens
            _note_stages(record, receiver.timings_s)
            if "prefill" in receiver.timings_s:
                collector.note_prefill(record.request_id, receiver.timings_s["prefill"])
        elif status == 200:
            record.outcome = "no_tokens"
        if status in TURNED_AWAY:
            collector.note_refused(record.request_id, status, reason)
        elif record.outcome not in ("stop", "length"):
            self.errors[f"{record.outcome}: {receiver.error_message}"] += 1
        collector.note_ended(record, slo_class)

    def _body(self, row: TraceRow, number: int) -> bytes:
        prompt = self._prompts.json(row, number)
        priority = b',"priority":%d' % row.priority if row.priority else b""
        return b'%b%b,"max_tokens":%d%b}' % (self._head, prompt, row.output_tokens, priority)


def program_headers(row: TraceRow) -> bytes:
    """Returns OpenCode's headers that name the program of a call and the program that waits for it.
    Servers without support for programs ignore them."""
    if not row.session:
        return b""
    headers = b"X-Session-Id: %b\r\n" % _header_name(row.session)
    if row.parent:
        headers += b"X-Parent-Session-Id: %b\r\n" % _header_name(row.parent)
    return headers


def _header_name(program: str) -> bytes:
    """Returns the name in the form of a header. Characters that no header can have are
    percent-encoded, and long names end in a digest, so that different names stay different."""
    name = quote(program, safe=_IN_HEADERS)
    if len(name) > MAX_NAME:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        name = f"{name[: MAX_NAME - len(digest)]}{digest}"
    return name.encode()


def _body_head(model: str) -> bytes:
    """Returns the fields of a body that vLLM and moonpool share. With `return_token_ids`, tokens
    without text are counted, too."""
    fields = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return msgspec.json.encode(fields)[:-1] + b',"prompt":'


def _slo_headers(slo: Slo) -> bytes:
    return b"X-SLO-TTFT-ms: %g\r\nX-SLO-TPOT-ms: %g\r\n" % (slo.ttft_s * 1e3, slo.tbt_s * 1e3)


def _note_stages(record: RequestRecord, timings_s: dict[str, float]) -> None:
    """Sets the record's stage times from the durations that the server reports.

    Time of network and client counts as handover and decoding.
    """
    at_s = record.arrived_s
    for stage, name in (
        ("placement", "placed_s"),
        ("queue_and_fetch", "prefill_started_s"),
        ("prefill", "prefill_done_s"),
    ):
        if stage not in timings_s:
            return
        at_s += timings_s[stage]
        setattr(record, name, at_s)
