"""Receives one answer of an OpenAI-compatible server: text, logprobs, finish reason or failure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moonpool.server_events import DONE, ServerEventReader

Outcome = Literal["answered", "refused", "error", "cut", "hung"]


class TokenDetail(msgspec.Struct, frozen=True):
    """One token with its logprob and the likeliest alternatives."""

    piece: bytes
    logprob: float
    alternatives: dict[bytes, float]


class Answer(msgspec.Struct):
    """What a server returned for a question. `tokens` is empty if the server sent no logprobs."""

    text: str = ""
    outcome: Outcome = "answered"
    detail: str = ""
    finish: str = ""
    tokens: list[TokenDetail] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retry_after_s: float = 0.0


class AnswerReceiver:
    """Fills `answer` from a streamed or whole body; call `end` after the last byte."""

    def __init__(self, streamed: bool) -> None:
        self.answer = Answer()
        self.status = 0
        self._streamed = streamed
        self._events = ServerEventReader()
        self._whole = b""
        self._parts: list[str] = []

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self._streamed &= b"json" not in headers.get(b"content-type", b"")
        try:
            self.answer.retry_after_s = float(headers.get(b"retry-after", b"0"))
        except ValueError:
            self.answer.retry_after_s = 0.0

    def on_body(self, data: bytes, now_s: float) -> None:
        if self.status != 200 or not self._streamed:
            self._whole += data
            return
        for payload in self._events.feed(data):
            if payload and payload != DONE:
                self._take(payload)

    def end(self, failure: str = "") -> Answer:
        """Returns the answer; `failure` says why the rest of it did not come."""
        answer = self.answer
        if self.status == 200 and not self._streamed and not failure:
            self._take(self._whole)
        answer.text = "".join(self._parts)
        if answer.outcome != "answered":
            return answer
        if self.status not in (0, 200):
            answer.outcome = "refused" if self.status in (429, 503) else "error"
            answer.detail = f"HTTP {self.status}: {_excerpt(self._whole)}"
        elif self.status == 0:
            answer.outcome, answer.detail = "error", failure or "no answer"
        elif not answer.finish:
            answer.outcome = "cut"
            answer.detail = failure or "a 200 that ended without finish_reason"
        return answer

    def _take(self, payload: bytes) -> None:
        try:
            event = msgspec.json.decode(payload)
            if event.get("error"):
                self._fail(f"error event: {_excerpt(payload)}")
                return
            for choice in event.get("choices") or ():
                self._take_choice(choice)
            self._take_usage(event.get("usage") or {})
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError, KeyError):
            self._fail(f"not a completion: {_excerpt(payload)}")

    def _take_choice(self, choice: dict[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or choice
        # some servers send both fields
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        for part in (reasoning, said.get("content"), said.get("text")):
            if isinstance(part, str):
                self._parts.append(part)
        self.answer.finish = choice.get("finish_reason") or self.answer.finish
        self.answer.tokens += _details(choice.get("logprobs") or {})

    def _take_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.answer.prompt_tokens = int(usage.get("prompt_tokens") or self.answer.prompt_tokens)
        self.answer.cached_tokens = int(details.get("cached_tokens") or self.answer.cached_tokens)

    def _fail(self, detail: str) -> None:
        self.answer.outcome, self.answer.detail = "error", detail


def _details(logprobs: dict[str, Any]) -> list[TokenDetail]:
    """Reads logprobs in the form of chats (`content`) and of completions (`tokens`)."""
    if logprobs.get("content"):
        return [
            TokenDetail(
                _piece(entry),
                float(entry["logprob"]),
                {_piece(each): float(each["logprob"]) for each in entry["top_logprobs"]},
            )
            for entry in logprobs["content"]
        ]
    tops = logprobs.get("top_logprobs") or []
    if not logprobs.get("tokens") or not all(tops):
        return []
    return [
        TokenDetail(token.encode(), float(value), {t.encode(): float(v) for t, v in top.items()})
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    ]


def _piece(entry: dict[str, Any]) -> bytes:
    data = entry.get("bytes")
    return bytes(data) if data is not None else str(entry["token"]).encode()


def _excerpt(data: bytes) -> str:
    return data[:200].decode(errors="replace").strip()
