"""Parses a streamed completion (server-sent events of OpenAI's API): tokens, end and errors.

Tokens are counted by `token_ids` if the server sends them; otherwise each event with text counts as
one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from moonpool.request_record import RequestRecord
from moonpool.server_events import DONE, ServerEventReader
from moonpool.types import MALFORMED, Slo

NO_SLO = Slo(ttft_s=1e6, tbt_s=1e6)
"""The SLO of a request that is only timed."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Extra(msgspec.Struct):
    """The part of an event that only a moonpool server sends."""

    timings_s: dict[str, float] = {}


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    moonpool: _Extra | None = None
    error: _Error | str | None = None
    message: str = ""  # older servers send the error message in this field
    detail: Any = None  # FastAPI sends the error here


_DECODER = msgspec.json.Decoder(_Event)


class CompletionReceiver:
    """Fills `record`. After the answer, `status`, `finish_reason`, `error_code` and `error_message`
    say how the request ended, and `retry_after_s` says when to send it again. `token_ids` are the
    answer's tokens, if the server sends ids. `request_id` is the server's name for the request, if
    the server tells it."""

    def __init__(
        self, record: RequestRecord, on_text: Callable[[str, float], None] | None = None
    ) -> None:
        """`on_text` gets each piece of text, and the time when it came."""
        self.record = record
        self.request_id = ""
        self.status = 0
        self.finish_reason = ""
        self.error_code = ""
        self.error_message = ""
        self.retry_after_s: float | None = None
        self.timings_s: dict[str, float] = {}
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.token_ids: list[int] = []
        self._events = ServerEventReader()
        self._failure = b""
        self._on_text = on_text

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        try:
            seconds = float(headers[b"retry-after"])
        except (KeyError, ValueError):
            seconds = inf
        self.retry_after_s = seconds if 0.0 <= seconds < inf else None

    def on_body(self, data: bytes, now_s: float) -> None:
        if self.status != 200:
            self._failure += data
            return
        for event in self._events.feed(data):
            self._on_event(event, now_s)

    def on_end(self) -> None:
        """Parses the body of an error. Call it after the whole answer."""
        if self.status != 200:
            self._take_error(self._failure)

    def _on_event(self, payload: bytes, now_s: float) -> None:
        if payload == DONE:
            return
        try:
            event = _DECODER.decode(payload)
        except MALFORMED as error:
            self.error_code = self.error_code or "bad_event"
            self.error_message = f"the server sent an event that is no completion: {error}"
            return
        if event.error is not None:
            self._note_error(event)
        for choice in event.choices:
            if choice.token_ids is not None:
                self.record.note_tokens(len(choice.token_ids), now_s)
                self.token_ids += choice.token_ids
            elif choice.text:
                self.record.note_tokens(1, now_s)
            if choice.text and self._on_text is not None:
                self._on_text(choice.text, now_s)
            self.finish_reason = choice.finish_reason or self.finish_reason
        usage = event.usage
        if usage is not None:
            self.prompt_tokens, self.completion_tokens = (
                usage.prompt_tokens,
                usage.completion_tokens,
            )
            if usage.prompt_tokens_details is not None:
                self.record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if event.moonpool is not None:
            self.timings_s = event.moonpool.timings_s

    def _take_error(self, body: bytes) -> None:
        try:
            self._note_error(_DECODER.decode(body))
        except MALFORMED:
            self.error_message = body[:200].decode(errors="replace")
        self.error_code = self.error_code or f"http_{self.status}"

    def _note_error(self, event: _Event) -> None:
        error = event.error
        if isinstance(error, _Error):
            self.error_code = str(error.code or error.type or "error")
            self.error_message = error.message
        else:
            self.error_message = error or event.message or str(event.detail or "")


class TokenTimesReceiver(CompletionReceiver):
    """A receiver that also keeps the time of each token."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self.token_s: list[float] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        before = self.record.num_generated_tokens
        super().on_body(data, now_s)
        self.token_s += [now_s] * (self.record.num_generated_tokens - before)
        if not self.token_s and self.finish_reason:
            self.token_s.append(now_s)  # the time of a token without text, such as half a character
