"""The endpoints that answer prompts: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`.

A call's life: the body is read and checked, becomes one `Request` per prompt and `n`, these run
side by side, and their increments become one JSON answer or a stream of chunks. The first increment
is awaited before the status line is sent, so that a refusal still has its own status.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from moonpool.api.bodies import ChatBody, CompletionBody, check_unsupported, decode_body
from moonpool.api.choice import Choice, Delta, run_choices
from moonpool.api.errors import ApiError, ClientGoneError, Headers, from_refused, internal_error
from moonpool.api.exchange import Exchange
from moonpool.api.forms import grammar_of, has_form
from moonpool.api.frontend import Frontend, Refused
from moonpool.api.options import ApiOptions
from moonpool.api.prompts import Prompt, PromptReader
from moonpool.api.responses import ResponseWriter, whole_response
from moonpool.api.responses_body import ResponsesBody, as_chat, of_input
from moonpool.api.sampling import (
    check_logprobs,
    check_ranges,
    ending_of,
    max_tokens_of,
    num_logprobs,
    sampling_of,
)
from moonpool.api.shapes import (
    AnswerHead,
    ChatShape,
    ChunkWriter,
    CompletionShape,
    EventWriter,
    Shape,
    usage_of,
    whole_answer,
)
from moonpool.api.tools import Piece, Tools
from moonpool.types import Request, RequestId, Slo, Token

logger = logging.getLogger(__name__)
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_RESPONSES = msgspec.json.Decoder(ResponsesBody)


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked call, ready to run."""

    head: AnswerHead
    shape: Shape
    choices: Sequence[Choice]
    num_per_prompt: int
    stream: bool
    with_usage: bool
    usage_in_chunks: bool
    with_logprobs: bool
    with_token_ids: bool

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.num_per_prompt)


class Generator:
    """Answers prompts through one frontend."""

    def __init__(self, frontend: Frontend, options: ApiOptions):
        self._frontend = frontend
        self._options = options
        self._names = options.served_names or (frontend.card.model_id,)
        self._prompts = PromptReader(frontend.tokenizer, frontend.card, options.thread_above_chars)
        self._chat_shape = ChatShape(frontend.tokenizer)
        self._active: set[str] = set()

    async def chat(self, exchange: Exchange) -> None:
        arrived_s = self._frontend.now()
        body = decode_body(_CHAT, await self._read(exchange))
        self._check(body)
        tools = Tools(body)
        prompts = await self._prompts.read_chat(body)
        await self._answer(exchange, body, prompts, self._chat_shape, arrived_s, tools)

    async def complete(self, exchange: Exchange) -> None:
        arrived_s = self._frontend.now()
        body = decode_body(_COMPLETION, await self._read(exchange))
        self._check(body)
        most_prompts = max(1, self._options.max_choices // (body.n or 1))
        prompts = await self._prompts.read_completion(body, most_prompts)
        shape = CompletionShape(self._frontend.tokenizer, bool(body.echo))
        await self._answer(exchange, body, prompts, shape, arrived_s)

    async def respond(self, exchange: Exchange) -> None:
        arrived_s = self._frontend.now()
        body = decode_body(_RESPONSES, await self._read(exchange))
        chat = as_chat(body)
        self._check(chat)
        tools = Tools(chat)
        try:
            prompts = await self._prompts.read_chat(chat)
        except ApiError as error:
            raise of_input(error) from None
        async with self._asked(exchange, chat, prompts, arrived_s, tools) as (request_id, choices):
            model = body.model or self._names[0]
            writer = ResponseWriter(f"resp_{request_id}", model, body, choices[0])
            if body.stream:
                await self._stream(exchange, choices, writer)
                return
            async with (
                exchange.watch(),
                aclosing(run_choices(choices, self._frontend)) as deltas,
            ):
                payload = whole_response(writer, [delta async for delta in deltas])
            await exchange.respond(200, payload, headers=_timing_headers(choices[0]))

    async def _read(self, exchange: Exchange) -> bytes:
        options = self._options
        return await exchange.read_body(options.max_body_bytes, options.body_timeout_s)

    def _check(self, body: ChatBody | CompletionBody) -> None:
        check_model(body.model, self._names)
        check_unsupported(body)
        check_ranges(body)
        check_logprobs(body, self._options.max_logprobs)
        if body.stream_options is not None and not body.stream:
            text = "'stream_options' is only allowed when 'stream' is true."
            raise ApiError(text, param="stream_options")
        if (body.n or 1) > self._options.max_choices:
            text = f"'n' must not be above {self._options.max_choices} on this server."
            raise ApiError(text, param="n")

    async def _answer(
        self,
        exchange: Exchange,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        shape: Shape,
        arrived_s: float,
        tools: Tools | None = None,
    ) -> None:
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        async with self._asked(exchange, body, prompts, arrived_s, tools) as (request_id, choices):
            answer_id, model = shape.id_prefix + request_id, body.model or self._names[0]
            call = _Call(
                head=AnswerHead(answer_id, int(time.time()), model),
                shape=shape,
                choices=choices,
                num_per_prompt=body.n or 1,
                stream=bool(body.stream),
                with_usage=with_usage,
                usage_in_chunks=bool(with_usage and options and options.continuous_usage_stats),
                with_logprobs=num_logprobs(body) is not None,
                with_token_ids=bool(body.return_token_ids),
            )
            if call.stream:
                await self._stream(exchange, choices, _chunk_writer(call))
            else:
                await self._answer_at_once(exchange, call)

    @asynccontextmanager
    async def _asked(
        self,
        exchange: Exchange,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        arrived_s: float,
        tools: Tools | None,
    ) -> AsyncIterator[tuple[str, list[Choice]]]:
        """The call's name, and its choices, which nobody has begun yet."""
        grammar = await self._grammar(body, tools)
        request_id = exchange.request_id
        if request_id in self._active:  # two calls may bear one X-Request-Id; requests may not
            request_id = f"{request_id}-{secrets.token_hex(4)}"
        choices = self._choices(exchange, request_id, body, (grammar, tools), prompts, arrived_s)
        self._active.add(request_id)
        try:
            yield request_id, choices
        finally:
            self._active.discard(request_id)

    def _choices(
        self,
        exchange: Exchange,
        request_id: str,
        body: ChatBody | CompletionBody,
        wanted: tuple[str, Tools | None],
        prompts: Sequence[Prompt],
        arrived_s: float,
    ) -> list[Choice]:
        frontend = self._frontend
        card, tokenizer, (grammar, tools) = frontend.card, frontend.tokenizer, wanted
        reader = None if tools is None else tools.reader(tokenizer.tool_template)
        ending = ending_of(body, card)
        slo, timeout_s = limits_of(exchange, frontend)
        tenant = tenant_of(exchange.tenant, body.cache_salt)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        choices: list[Choice] = []
        for prompt in prompts:
            max_tokens = max_tokens_of(body, len(prompt.token_ids), card.max_model_tokens)
            for offset in range(body.n or 1):
                index = len(choices)
                sampling = sampling_of(body, ending, grammar, max_tokens, seed + offset, card)
                request = Request(
                    request_id=RequestId(f"{request_id}-{index}" if index else request_id),
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                    slo=slo,
                    arrived_s=arrived_s,
                    deadline_s=arrived_s + timeout_s,
                    tenant=tenant,
                )
                calls = None if reader is None else reader()
                choices.append(Choice(index, prompt, request, ending, tokenizer, calls))
        return choices

    async def _grammar(self, body: ChatBody | CompletionBody, tools: Tools | None) -> str:
        """Of the form that the answer must have, "" if it may be anything."""
        must_call = tools.schema() if tools is not None and tools.must_call else None
        if must_call is None and not has_form(body):
            return ""
        can_end = bool(self._frontend.card.eos_token_ids)
        return await asyncio.to_thread(grammar_of, body, can_end, must_call)

    async def _answer_at_once(self, exchange: Exchange, call: _Call) -> None:
        texts: list[list[str]] = [[] for _ in call.choices]
        tokens: list[list[Token]] = [[] for _ in call.choices]
        calls: list[list[Piece]] = [[] for _ in call.choices]
        keep_tokens = call.with_logprobs or call.with_token_ids
        async with (
            exchange.watch(),
            aclosing(run_choices(call.choices, self._frontend)) as deltas,
        ):
            async for delta in deltas:
                index = delta.choice.index
                texts[index].append(delta.text)
                calls[index].extend(delta.calls)
                if keep_tokens:
                    tokens[index].extend(delta.tokens)
        results = [
            (c, "".join(texts[c.index]), tokens[c.index], calls[c.index]) for c in call.choices
        ]
        payload = whole_answer(
            call.head,
            call.shape,
            results,
            with_logprobs=call.with_logprobs,
            with_token_ids=call.with_token_ids,
            usage=call.usage(),
        )
        await exchange.respond(200, payload, headers=_timing_headers(call.choices[0]))

    async def _stream(
        self, exchange: Exchange, choices: Sequence[Choice], writer: EventWriter
    ) -> None:
        try:
            async with (
                exchange.watch(),
                aclosing(run_choices(choices, self._frontend)) as deltas,
            ):
                await _send_deltas(exchange, writer, deltas)
        except Refused as refused:
            await _end_with_error(exchange, writer, from_refused(refused))
        except (ApiError, ClientGoneError):
            raise
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            await _end_with_error(exchange, writer, internal_error(exchange.request_id))
        else:
            await exchange.end_events(writer.end())


async def _send_deltas(
    exchange: Exchange, writer: EventWriter, deltas: AsyncGenerator[Delta, None]
) -> None:
    async for delta in deltas:
        begins = not exchange.started
        events = (writer.begin() if begins else b"") + writer.events(delta)
        if begins:
            await exchange.start_events()
        if events:
            await exchange.send_events(events)


def _chunk_writer(call: _Call) -> ChunkWriter:
    return ChunkWriter(
        call.head,
        call.shape,
        call.choices,
        with_logprobs=call.with_logprobs,
        with_token_ids=call.with_token_ids,
        with_usage=call.with_usage,
        num_per_prompt=call.num_per_prompt,
        usage_in_chunks=call.usage_in_chunks,
    )


async def _end_with_error(exchange: Exchange, writer: EventWriter, error: ApiError) -> None:
    """Before the first byte an error has its own status; later it can only be an event."""
    if not exchange.started:
        raise error
    await exchange.end_events(writer.error(error))


def check_model(name: str | None, served_names: Sequence[str]) -> None:
    if name is not None and name not in served_names:
        raise ApiError(
            f"The model '{name[:200]}' does not exist; this server has {', '.join(served_names)}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def tenant_of(key_tenant: str, cache_salt: str | None) -> str:
    """A tenant's name holds no '/', so no salt can make one tenant look like another."""
    if cache_salt is None:
        return key_tenant
    if not 0 < len(cache_salt) <= 256:
        raise ApiError("'cache_salt' must have 1 to 256 characters.", param="cache_salt")
    return f"{key_tenant}/{cache_salt}"


def limits_of(exchange: Exchange, frontend: Frontend) -> tuple[Slo, float]:
    """The service levels and the time limit that hold for this call."""
    slo = frontend.default_slo
    ttft_ms = _milliseconds(exchange, b"x-slo-ttft-ms")
    tbt_ms = _milliseconds(exchange, b"x-slo-tpot-ms")
    if ttft_ms is not None or tbt_ms is not None:
        slo = Slo(
            ttft_s=slo.ttft_s if ttft_ms is None else ttft_ms / 1e3,
            tbt_s=slo.tbt_s if tbt_ms is None else tbt_ms / 1e3,
        )
    timeout_ms = _milliseconds(exchange, b"x-request-timeout-ms")
    timeout_s = frontend.request_timeout_s
    return slo, timeout_s if timeout_ms is None else min(timeout_s, timeout_ms / 1e3)


def _milliseconds(exchange: Exchange, name: bytes) -> float | None:
    raw = exchange.headers.get(name)
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1e12:
        header = name.decode()
        text = f"The header {header} must be a number of milliseconds above 0."
        raise ApiError(text, param=header, code="invalid_header")
    return value


def _timing_headers(choice: Choice) -> Headers:
    if not choice.timings_s:
        return ()
    text = ", ".join(f"{stage}={seconds:.6f}" for stage, seconds in choice.timings_s.items())
    return ((b"x-moonpool-timing", text.encode("ascii", "replace")),)
