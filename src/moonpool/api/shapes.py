"""The JSON of responses, whole and streamed, in OpenAI's two shapes: chat and completions.

This module owns the bytes on the wire. A chunk is built for every token, so it is joined from parts
that are encoded once per response and the encoded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from moonpool.api.choice import Choice, Delta
from moonpool.api.errors import ApiError
from moonpool.api.output_text.said import ToolCallDelta
from moonpool.api.prompt_logprobs import echoed_logprobs, prompt_logprobs_field
from moonpool.api.tools import together
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import Token, TokenLogprobs

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
_END = b"}]}\n\n"
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every part of a response repeats, and the optional fields that the call asked
    for."""

    id: str
    created: int
    model: str
    system_fingerprint: str = ""
    num_per_prompt: int = 1
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_prompt_logprobs: bool = False
    tokens_as_ids: bool = False  # whether logprobs write a token as token_id:N
    with_usage: bool = False
    usage_in_chunks: bool = False  # whether each chunk has the usage so far instead of null


class Shape(Protocol):
    """The JSON format of one of the two endpoints."""

    object: str
    chunk_object: str
    id_prefix: str
    is_chat: bool
    tokenizer: Tokenizer

    def opening(self, choice: Choice) -> bytes:
        """Returns the fields of the first chunk of a choice, or nothing."""
        ...

    def text_field(self, text: str, reasoning: str = "") -> bytes: ...

    def calls_field(self, calls: Sequence[ToolCallDelta]) -> bytes: ...

    def closing_field(self) -> bytes: ...

    def logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int], as_ids: bool = False
    ) -> dict[str, Any]:
        """`offsets`: the positions in the text at which the tokens begin. `as_ids`: whether a token
        is written as token_id:N instead of its text."""
        ...

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[ToolCallDelta],
        logprobs: dict[str, Any] | None,
        reasoning: str = "",
    ) -> dict[str, Any]: ...


class EventWriter(Protocol):
    """Writes the events of one streamed response."""

    def begin(self) -> bytes: ...

    def events(self, delta: Delta) -> bytes:
        """Returns the events of one increment, or none if it has no visible content."""
        ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """Returns the event that ends the stream in place of `end`."""
        ...


class ItemWriter(EventWriter, Protocol):
    """Writes one response, as events or as a whole, from the increments that are passed to
    `events`."""

    def whole(self) -> dict[str, Any]: ...


class ChatShape:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    is_chat = True

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def opening(self, choice: Choice) -> bytes:
        content = _encode(choice.echo or "")
        return b'"delta":{"role":"assistant","content":' + content + b"}"

    def text_field(self, text: str, reasoning: str = "") -> bytes:
        if not reasoning:
            return b'"delta":{"content":' + _encode(text) + b"}"
        return b'"delta":' + _encode(_with_reasoning({"content": text} if text else {}, reasoning))

    def calls_field(self, calls: Sequence[ToolCallDelta]) -> bytes:
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

    def logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int], as_ids: bool = False
    ) -> dict[str, Any]:
        content = []
        for token in tokens:
            found = _logprobs_of(token)
            top = [self._entry(token_id, value, as_ids) for token_id, value in found.top]
            own = self._entry(token.token_id, found.logprob, as_ids)
            content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
        token_bytes = self.tokenizer.token_bytes(token_id)
        return {
            "token": _id_text(token_id) if as_ids else token_bytes.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(token_bytes),
        }

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[ToolCallDelta],
        logprobs: dict[str, Any] | None,
        reasoning: str = "",
    ) -> dict[str, Any]:
        text = (choice.echo or "") + text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": together(calls)}
        if reasoning:
            message = _with_reasoning(message, reasoning)
        return {"message": message, "logprobs": logprobs}


def _with_reasoning(message: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """Returns the reasoning under both names that clients know: vLLM's, and the older one of
    DeepSeek's API."""
    return message | {"reasoning": reasoning, "reasoning_content": reasoning}


class CompletionShape:
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    is_chat = False

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def opening(self, choice: Choice) -> bytes:
        return b"" if choice.echo is None else self.text_field(choice.echo)

    def text_field(self, text: str, reasoning: str = "") -> bytes:
        return b'"text":' + _encode(text)

    def calls_field(self, calls: Sequence[ToolCallDelta]) -> bytes:
        """Raises AssertionError, because completions have no tool calls."""
        raise AssertionError("completions have no tool calls")

    def closing_field(self) -> bytes:
        return b'"text":""'

    def logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int], as_ids: bool = False
    ) -> dict[str, Any]:
        texts: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        for token in tokens:
            found = _logprobs_of(token)
            text = self._name(token.token_id, as_ids)
            value = max(found.logprob, _LEAST_LOGPROB)
            likely = {token.token_id: value} | dict(found.top)  # the drawn token first, as in vLLM
            top: dict[str, float] = {}
            for token_id, logprob in likely.items():
                name = self._name(token_id, as_ids)
                # Two tokens may have the same text; both of them are listed.
                top[_id_text(token_id) if name in top else name] = max(logprob, _LEAST_LOGPROB)
            texts.append(text)
            values.append(value)
            tops.append(top)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }

    def whole(
        self,
        choice: Choice,
        text: str,
        calls: Sequence[ToolCallDelta],
        logprobs: dict[str, Any] | None,
        reasoning: str = "",
    ) -> dict[str, Any]:
        return {"text": (choice.echo or "") + text, "logprobs": logprobs}

    def _name(self, token_id: int, as_ids: bool) -> str:
        return _id_text(token_id) if as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


class ChunkWriter:
    """Writes the server-sent events of one streamed response."""

    def __init__(self, answer: AnswerFormat, shape: Shape, choices: Sequence[Choice]):
        self._answer = answer
        self._shape = shape
        self._choices = choices
        self._no_logprobs = b',"logprobs":null'
        if answer.with_token_ids:
            self._no_logprobs += b',"token_ids":[]'
        top = _top_fields(answer, shape.chunk_object)
        if answer.with_usage and not answer.usage_in_chunks:
            top["usage"] = None
        self._top = b"data: " + _encode(top)[:-1]
        self._starts = [
            self._top + b',"choices":[{"index":%d,' % choice.index for choice in choices
        ]
        self._offsets = [c.text_offsets() for c in choices] if answer.with_logprobs else []
        self._opened = [False] * len(choices)

    def begin(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        """Returns the chunks of one increment, or none if it has no visible content."""
        choice = delta.choice
        index = choice.index
        parts: list[bytes] = []
        if not self._opened[index]:
            self._opened[index] = True
            self._open(choice, parts)
        extras = self._answer.with_logprobs or self._answer.with_token_ids
        if delta.text or delta.reasoning or (extras and delta.tokens):
            parts += (
                self._starts[index],
                self._shape.text_field(delta.text, delta.reasoning),
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
                self._no_logprobs,
                b',"finish_reason":%b,"stop_reason":%b'
                % (_encode(choice.finish_word), _encode(choice.stop_reason)),
                self._end(),
            )
        return b"".join(parts)

    def end(self) -> bytes:
        if not self._answer.with_usage:
            return DONE
        first = self._choices[0]
        extra = {"request_id": first.request.request_id, "timings_s": first.timings_s or {}}
        usage = self._usage()
        top = self._top.replace(b',"usage":null', b"")
        last = b',"choices":[],"usage":%b,"moonpool":%b}\n\n' % (_encode(usage), _encode(extra))
        return top + last + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.payload() + b"\n\n"

    def _open(self, choice: Choice, parts: list[bytes]) -> None:
        opening, prompt = self._shape.opening(choice), b""
        if self._answer.with_token_ids:
            opening = opening or self._shape.text_field("")
            prompt = b',"prompt_token_ids":' + _encode(choice.request.token_ids)
        if opening:
            parts += (
                self._starts[choice.index],
                opening,
                b"" if self._shape.is_chat else prompt,
                self._no_logprobs,
                b',"finish_reason":null',
                self._end(prompt if self._shape.is_chat else b"", choice),
            )

    def _end(self, beside: bytes = b"", opened: Choice | None = None) -> bytes:
        """`beside`: fields that follow the choice. `opened`: whether the choice begins without any
        of its tokens in this chunk."""
        if not (beside or self._answer.usage_in_chunks):
            return _END
        usage = b""
        if self._answer.usage_in_chunks:
            usage = b',"usage":' + _encode(self._usage(opened))
        return b"}]" + beside + usage + b"}\n\n"

    def _usage(self, opened: Choice | None = None) -> dict[str, Any]:
        answer = self._answer
        return usage_of(self._choices, answer.num_per_prompt, self._shape.is_chat, opened)

    def _extras(self, delta: Delta) -> bytes:
        extras = b',"logprobs":null'
        if self._answer.with_logprobs:
            offsets = self._offsets[delta.choice.index].of(delta.tokens)
            logprobs = self._shape.logprobs(delta.tokens, offsets, self._answer.tokens_as_ids)
            extras = b',"logprobs":' + _encode(logprobs)
        if self._answer.with_token_ids:
            extras += b',"token_ids":' + _encode([token.token_id for token in delta.tokens])
        return extras


def whole_answer(
    answer: AnswerFormat,
    shape: Shape,
    results: Sequence[tuple[Choice, str, Sequence[Token], Sequence[ToolCallDelta], str]],
) -> bytes:
    """Returns the body of a response that is not streamed. `results`: each choice with its text,
    tokens, calls and reasoning."""
    choices, prompt = [], dict[str, Any]()
    for choice, text, tokens, calls, reasoning in results:
        logprobs = None
        if answer.with_logprobs:
            logprobs = _whole_logprobs(answer, shape, choice, tokens)
        written = {
            "index": choice.index,
            **shape.whole(choice, text, calls, logprobs, reasoning),
            "finish_reason": choice.finish_word,
            "stop_reason": choice.stop_reason,
            "token_ids": [t.token_id for t in tokens] if answer.with_token_ids else None,
        }
        if not (prompt and shape.is_chat):
            prompt = _prompt_fields(answer, choice, shape.tokenizer)
        choices.append(written if shape.is_chat else written | prompt)
    found = [result[0] for result in results]
    return _encode(
        {
            **_top_fields(answer, shape.object),
            "choices": choices,
            "usage": usage_of(found, answer.num_per_prompt, shape.is_chat),
            **(prompt if shape.is_chat else {}),
        }
    )


def _top_fields(answer: AnswerFormat, kind: str) -> dict[str, Any]:
    top = {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}
    if answer.system_fingerprint:
        top["system_fingerprint"] = answer.system_fingerprint
    return top


def _prompt_fields(answer: AnswerFormat, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns vLLM's fields about the prompt: a chat has them once, a completion in each choice.
    Fields that the call did not ask for are null, because clients of vLLM read them without a
    check."""
    with_logprobs = answer.with_prompt_logprobs
    return {
        "prompt_logprobs": prompt_logprobs_field(choice, tokenizer) if with_logprobs else None,
        "prompt_token_ids": choice.request.token_ids if answer.with_token_ids else None,
    }


def _whole_logprobs(
    answer: AnswerFormat, shape: Shape, choice: Choice, tokens: Sequence[Token]
) -> dict[str, Any]:
    if choice.echo is None or shape.is_chat:
        offsets = choice.text_offsets().of(tokens)
        return shape.logprobs(tokens, offsets, answer.tokens_as_ids)
    return echoed_logprobs(choice, choice.echo, tokens, shape, answer.tokens_as_ids)


def usage_of(
    choices: Sequence[Choice],
    num_per_prompt: int,
    is_chat: bool,
    opened: Choice | None = None,
) -> dict[str, Any]:
    """Returns the usage. As at OpenAI, a prompt counts once for all of its choices.

    `opened`: a choice of which no token is counted yet.
    """
    firsts = choices[::num_per_prompt]
    counted = choices if opened is None else [c for c in choices if c is not opened]
    prompt_tokens = sum(len(choice.request.token_ids) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in counted)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
    }
    if is_chat:
        reasoning_tokens = sum(choice.reasoning_tokens for choice in counted)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def _logprobs_of(token: Token) -> TokenLogprobs:
    if token.logprobs is None:
        raise RuntimeError("the engine returned no logprobs for a request that needs them")
    return token.logprobs
