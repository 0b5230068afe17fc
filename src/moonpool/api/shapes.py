"""The JSON of answers, whole and streamed, in OpenAI's two shapes: chat and completions.

Owns the bytes on the wire. A streamed chunk is put together from parts encoded once per answer and
the encoded text, because that is done for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from moonpool.api.choice import Choice, Delta
from moonpool.api.errors import ApiError
from moonpool.api.tools import Piece, together
from moonpool.engine.tokenizer import Tokenizer
from moonpool.types import Token, TokenLogprobs

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
_END = b"}]}\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class AnswerHead(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str


class Shape(Protocol):
    """How one of the two endpoints writes its answers."""

    object: str
    chunk_object: str
    id_prefix: str

    def opening(self, choice: Choice) -> bytes:
        """What begins a choice's stream: the fields of one chunk's choice, or nothing."""
        ...

    def text_field(self, text: str) -> bytes: ...

    def calls_field(self, calls: Sequence[Piece]) -> bytes: ...

    def closing_field(self) -> bytes: ...

    def logprobs(self, tokens: Sequence[Token], text_offset: int) -> dict[str, Any]: ...

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[Piece],
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]: ...


class EventWriter(Protocol):
    """How an answer is streamed."""

    def begin(self) -> bytes: ...

    def events(self, delta: Delta) -> bytes:
        """Of one increment; empty when there is nothing to tell yet."""
        ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """In the place of the end."""
        ...


class ChatShape:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def opening(self, choice: Choice) -> bytes:
        return b'"delta":{"role":"assistant","content":""}'

    def text_field(self, text: str) -> bytes:
        return b'"delta":{"content":' + _encode(text) + b"}"

    def calls_field(self, calls: Sequence[Piece]) -> bytes:
        written = []
        for call in calls:
            head: dict[str, Any] = {"index": call.number}
            function = {"arguments": call.arguments}
            if call.name is not None:
                head |= {"id": call.call_id, "type": "function"}
                function = {"name": call.name, **function}
            written.append({**head, "function": function})
        return b'"delta":{"tool_calls":' + _encode(written) + b"}"

    def closing_field(self) -> bytes:
        return b'"delta":{}'

    def logprobs(self, tokens: Sequence[Token], text_offset: int) -> dict[str, Any]:
        content = []
        for token in tokens:
            found = _logprobs_of(token)
            top = [self._entry(token_id, value) for token_id, value in found.top]
            content.append({**self._entry(token.token_id, found.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return {
            "token": token_bytes.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(token_bytes),
        }

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[Piece],
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": together(calls)}
        return {"message": message, "logprobs": logprobs}


class CompletionShape:
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, tokenizer: Tokenizer, echo: bool):
        self._tokenizer = tokenizer
        self._echo = echo

    def opening(self, choice: Choice) -> bytes:
        return self.text_field(self._echoed(choice)) if self._echo else b""

    def text_field(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def calls_field(self, calls: Sequence[Piece]) -> bytes:
        raise AssertionError("completions call no tools")

    def closing_field(self) -> bytes:
        return b'"text":""'

    def logprobs(self, tokens: Sequence[Token], text_offset: int) -> dict[str, Any]:
        texts: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            found = _logprobs_of(token)
            text = self._text(token.token_id)
            value = max(found.logprob, _LEAST_LOGPROB)
            top: dict[str, float] = {}
            for token_id, logprob in (*found.top, (token.token_id, value)):
                name = self._text(token_id)
                top[name] = max(logprob, top.get(name, _LEAST_LOGPROB))
            texts.append(text)
            values.append(value)
            tops.append(top)
            offsets.append(text_offset)
            text_offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[Piece],
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        if self._echo:
            text = self._echoed(choice) + text
        return {"text": text, "logprobs": logprobs}

    def _echoed(self, choice: Choice) -> str:
        if choice.prompt.text is not None:
            return choice.prompt.text
        return self._tokenizer.decode(choice.prompt.token_ids)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChunkWriter:
    """The server-sent events of one streamed answer."""

    def __init__(
        self,
        head: AnswerHead,
        shape: Shape,
        choices: Sequence[Choice],
        *,
        with_logprobs: bool,
        with_token_ids: bool,
        with_usage: bool,
        num_per_prompt: int,
        usage_in_chunks: bool,
    ):
        """`usage_in_chunks`: what was used so far, rather than null, in each chunk."""
        self._shape = shape
        self._choices = choices
        self._num_per_prompt = num_per_prompt
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._no_logprobs = b',"logprobs":null'
        top = {
            "id": head.id,
            "object": shape.chunk_object,
            "created": head.created,
            "model": head.model,
        }
        if with_usage and not usage_in_chunks:
            top["usage"] = None
        self._top = b"data: " + _encode(top)[:-1]
        self._starts = [
            self._top + b',"choices":[{"index":%d,' % choice.index for choice in choices
        ]
        self._text_offsets = [0] * len(choices)
        self._opened = [False] * len(choices)
        self._with_usage = with_usage
        self._usage_in_chunks = usage_in_chunks

    def begin(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        """The chunks of one increment; empty when there is nothing to tell yet."""
        choice = delta.choice
        index = choice.index
        parts: list[bytes] = []
        if not self._opened[index]:
            self._opened[index] = True
            self._open(choice, parts)
        extras = self._with_logprobs or self._with_token_ids
        if delta.text or (extras and delta.tokens):
            parts += (
                self._starts[index],
                self._shape.text_field(delta.text),
                self._extras(delta) if extras else self._no_logprobs,
                b',"finish_reason":null',
                self._end(),
            )
        if delta.calls:
            parts += (
                self._starts[index],
                self._shape.calls_field(delta.calls),
                self._no_logprobs,
                b',"finish_reason":null',
                self._end(),
            )
        if delta.finish_reason is not None:
            parts += (
                self._starts[index],
                self._shape.closing_field(),
                b',"logprobs":null,"finish_reason":%b,"stop_reason":%b'
                % (_encode(choice.finish_word), _encode(choice.stop_reason)),
                self._end(),
            )
        return b"".join(parts)

    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        first = self._choices[0]
        extra = {"request_id": first.request.request_id, "timings_s": first.timings_s or {}}
        usage = usage_of(self._choices, self._num_per_prompt)
        top = self._top.replace(b',"usage":null', b"")
        told = b',"choices":[],"usage":%b,"moonpool":%b}\n\n' % (_encode(usage), _encode(extra))
        return top + told + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.payload() + b"\n\n"

    def _open(self, choice: Choice, parts: list[bytes]) -> None:
        opening = self._shape.opening(choice)
        if self._with_token_ids:
            opening = opening or self._shape.text_field("")
            opening += b',"prompt_token_ids":' + _encode(choice.prompt.token_ids)
        if opening:
            parts += (
                self._starts[choice.index],
                opening,
                self._no_logprobs,
                b',"finish_reason":null',
                self._end(),
            )

    def _end(self) -> bytes:
        if not self._usage_in_chunks:
            return _END
        return b'}],"usage":' + _encode(usage_of(self._choices, self._num_per_prompt)) + b"}\n\n"

    def _extras(self, delta: Delta) -> bytes:
        extras = b',"logprobs":null'
        if self._with_logprobs:
            index = delta.choice.index
            logprobs = self._shape.logprobs(delta.tokens, self._text_offsets[index])
            self._text_offsets[index] += sum(map(len, logprobs.get("tokens", ())))
            extras = b',"logprobs":' + _encode(logprobs)
        if self._with_token_ids:
            extras += b',"token_ids":' + _encode([token.token_id for token in delta.tokens])
        return extras


def whole_answer(
    head: AnswerHead,
    shape: Shape,
    results: Sequence[tuple[Choice, str, Sequence[Token], Sequence[Piece]]],
    *,
    with_logprobs: bool,
    with_token_ids: bool,
    usage: dict[str, Any],
) -> bytes:
    choices = []
    for choice, text, tokens, calls in results:
        logprobs = shape.logprobs(tokens, 0) if with_logprobs else None
        written = {
            "index": choice.index,
            **shape.whole(choice, text, calls, logprobs),
            "finish_reason": choice.finish_word,
            "stop_reason": choice.stop_reason,
        }
        if with_token_ids:
            written["token_ids"] = [token.token_id for token in tokens]
            written["prompt_token_ids"] = choice.prompt.token_ids
        choices.append(written)
    return _encode(
        {
            "id": head.id,
            "object": shape.object,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage,
        }
    )


def usage_of(choices: Sequence[Choice], num_per_prompt: int) -> dict[str, Any]:
    """A prompt counts once however many answers it got, as OpenAI counts."""
    firsts = choices[::num_per_prompt]
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
    }


def _logprobs_of(token: Token) -> TokenLogprobs:
    if token.logprobs is None:
        raise RuntimeError("the engine left out the logprobs that were asked for")
    return token.logprobs
