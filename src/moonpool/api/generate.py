"""The endpoints that generate: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and
`/v1/messages`.

A call is read and checked, and becomes one `Request` per prompt and per `n`. The requests run side
by side, and their increments become one JSON response or a stream of chunks. The status line is
sent after the first increment, so that a rejected request gets its own status. The status line is
sent earlier if a placed request has produced nothing for a time (see `connection.silence`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
from msgspec import structs

from moonpool.api import messages
from moonpool.api.body_process import Kind
from moonpool.api.call_headers import (
    TimeLimits,
    beside,
    limits_of,
    read_traceparent,
    tenant_of,
)
from moonpool.api.choice import Choice, Delta, Take, run_choices
from moonpool.api.connection.kept_stream import Delivered, StreamFacts
from moonpool.api.connection.silence import Silence, comment_at
from moonpool.api.errors import ApiError, ClientGoneError, Headers, from_refused, internal_error
from moonpool.api.http_context import HttpContext
from moonpool.api.models.endpoint import ModelEndpoint
from moonpool.api.output_text.grammar import is_json
from moonpool.api.output_text.model_output import ModelOutput
from moonpool.api.output_text.said import ToolCallDelta
from moonpool.api.output_text.source import OutputReader
from moonpool.api.preparation import PreparedCall
from moonpool.api.program_identity import program_of
from moonpool.api.responses import ResponseWriter
from moonpool.api.resume.event_ids import (
    INSTEAD,
    EventPosition,
    NumberedEvents,
    ResumedEvents,
    another_call,
    check_resumption,
    digest_of_call,
    last_event_id,
    resume_tokens,
)
from moonpool.api.sampling import Ending, ending_of, max_tokens_of, num_logprobs, sampling_of
from moonpool.api.serving_backend import RequestRefused
from moonpool.api.shapes import (
    AnswerFormat,
    ChatShape,
    ChunkWriter,
    CompletionShape,
    EventWriter,
    ItemWriter,
    Shape,
    whole_answer,
)
from moonpool.types import Request, RequestId, Token

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Continued:
    """A response that a call continues or asks for again."""

    facts: StreamFacts
    deliveries: Sequence[Delivered] = ()
    num_returns: int = 0  # how often a client has asked for the response again


@dataclass(frozen=True, slots=True)
class _Resumption:
    """Which part of its response a client has, and which part is known here."""

    # position after the client's last event, or None if the client wants no ids
    position: EventPosition | None
    # number of tokens of each choice that the client has, or None if it does not tell
    client_tokens: tuple[int, ...] | None
    known: Sequence[Delivered]  # increments that are known from the broken connection
    is_new: bool  # whether the call continues no answer
    seed_is_unknown: bool  # whether the client has an answer with an unknown seed


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked call of a generating endpoint."""

    kind: Kind
    context: HttpContext
    prepared: PreparedCall
    limits: TimeLimits
    facts: StreamFacts
    resumption: _Resumption


class Generator(ModelEndpoint):
    """Serves the generating endpoints."""

    @cached_property
    def _model_output(self) -> ModelOutput:
        options = self._options
        return ModelOutput(
            self._backend.tokenizer, options.tool_call_parser, options.reasoning_parser
        )

    async def chat(self, context: HttpContext) -> None:
        shape = ChatShape(self._backend.tokenizer)
        await self._answer(await self._call("chat", context), shape)

    async def complete(self, context: HttpContext) -> None:
        shape = CompletionShape(self._backend.tokenizer)
        await self._answer(await self._call("completion", context), shape)

    async def respond(self, context: HttpContext) -> None:
        call = await self._call("responses", context)
        body = call.prepared.original
        async with self._begun(call) as (request_id, choices):
            model = body.model or self._name
            made = (f"resp_{request_id}", model, body, choices[0], call.facts)
            writer = ResponseWriter(*made, self._backend.tokenizer)
            await self._write(call, request_id, bool(body.stream), choices, writer)

    async def message(self, context: HttpContext) -> None:
        call = await self._call("messages", context)
        body = call.prepared.original
        async with self._begun(call) as (request_id, choices):
            model = body.model or self._name
            writer = messages.MessageWriter(f"msg_{request_id}", model, choices[0])
            await self._write(call, request_id, bool(body.stream), choices, writer)

    async def _call(self, kind: Kind, context: HttpContext) -> _Call:
        """Reads and checks the body of a call."""
        limits = limits_of(context, self._backend)
        position = last_event_id(context.headers)
        client_tokens = resume_tokens(context.headers)
        if client_tokens is not None and (
            position is not None or kind not in ("chat", "completion")
        ):
            why = "This API does not state" if position is None else "Event ids state"
            text = f"{why} how many tokens its clients have. Use {INSTEAD}."
            raise ApiError(text, param="X-Resume-Tokens", code="invalid_header")
        raw = await context.read_body(self._options.max_body_bytes, self._options.body_timeout_s)
        digest = await context.digest(raw)
        resumes = bool(client_tokens and any(client_tokens))
        continued = await self._continued(context, digest, position, resumes)
        is_new = continued is None and not (context.kept is not None and context.kept.is_resumed)
        if is_new:
            await self._rates.admit(context.tenant, limits.arrived_s)
        known = continued.deliveries if continued else ()
        arrived_s, facts = context.keep_call(
            raw,
            limits.arrived_s,
            self._backend.card,
            continued.facts if continued else None,
            digest,
            continued.num_returns if continued else 0,
        )
        limits = limits.since(arrived_s)
        left_s = limits.left_s(self._backend.now())
        prepared = await self._bodies.call(kind, raw, context.party, left_s)
        seed_is_unknown = is_new and prepared.body.seed is None
        resumption = _Resumption(position, client_tokens, known, is_new, seed_is_unknown)
        return _Call(kind, context, prepared, limits, facts, resumption)

    async def _continued(
        self, context: HttpContext, digest: bytes, position: EventPosition | None, resumes: bool
    ) -> _Continued | None:
        """Returns the response that a call continues or asks for again, or None for a new call."""
        own, card = None, self._backend.card
        if position is not None and position.progress:
            own = position.facts(card.max_model_tokens, card.system_fingerprint)
        request_id = context.request_id if own is None else own.request_id
        known = await context.known(digest, request_id, displaces=resumes or own is not None)
        if known is None or (own is not None and _drawn(own) != _drawn(known.facts)):
            return None if own is None else _Continued(own)
        facts = structs.replace(known.facts, system_fingerprint=card.system_fingerprint)
        return _Continued(facts, known.deliveries, known.num_returns)

    async def _write(
        self,
        call: _Call,
        request_id: str,
        stream: bool,
        choices: Sequence[Choice],
        writer: ItemWriter,
    ) -> None:
        """Runs the choices, and sends their events or the whole response."""
        context = call.context
        if stream:
            await self._stream(call, request_id, choices, writer)
            return

        async def take(delta: Delta) -> None:
            writer.events(delta)

        async with context.watch():
            await self._run(call, choices, take)
        payload = msgspec.json.encode(writer.whole())
        await context.respond(200, payload, headers=_timing_headers(choices[0]))

    async def _answer(self, call: _Call, shape: Shape) -> None:
        body = call.prepared.body
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        async with self._begun(call) as (request_id, choices):
            answer = AnswerFormat(
                id=shape.id_prefix + request_id,
                created=call.facts.created_s,
                model=body.model or self._name,
                system_fingerprint=call.facts.system_fingerprint,
                num_per_prompt=body.n or 1,
                with_logprobs=num_logprobs(body) is not None,
                with_token_ids=bool(body.return_token_ids),
                with_prompt_logprobs=body.prompt_logprobs is not None,
                tokens_as_ids=bool(body.return_tokens_as_token_ids),
                with_usage=with_usage,
                usage_in_chunks=bool(with_usage and options and options.continuous_usage_stats),
            )
            if body.stream:
                writer = ChunkWriter(answer, shape, choices)
                await self._stream(call, request_id, choices, writer)
            else:
                await self._answer_at_once(call, choices, answer, shape)

    async def _run(self, call: _Call, choices: Sequence[Choice], take: Take) -> None:
        """Runs the choices. Counts the tokens of the prompts, and of the answers as they come. The
        known part of an answer that continues was counted before."""
        tenant = call.context.tenant
        run = choices, self._backend, take, call.context.kept, call.resumption.known
        if not self._rates.counts(tenant):
            await run_choices(*run)
            return
        num_counted: dict[int, int] = {}  # by choice

        def spend(delta: Delta) -> None:
            choice = delta.choice
            num_new = choice.num_tokens - len(choice.delivered or ())
            self._rates.spend(tenant, num_new - num_counted.get(choice.index, 0))
            num_counted[choice.index] = num_new

        num_prompt_tokens = sum(map(len, call.prepared.prompts)) if call.resumption.is_new else 0
        with self._rates.prompts(tenant, num_prompt_tokens):
            await run_choices(*run, spend)

    @asynccontextmanager
    async def _begun(self, call: _Call) -> AsyncIterator[tuple[str, list[Choice]]]:
        """Yields the call's request id and its choices, of which none is running yet."""
        with self._active.begin(call.context) as (request_id, scoped):
            choices = self._choices(call, scoped)
            resumed = call.resumption
            if resumed.client_tokens is not None:
                is_streamed = bool((call.prepared.original or call.prepared.body).stream)
                unknown = resumed.seed_is_unknown
                check_resumption(resumed.client_tokens, choices, is_streamed, unknown)
            try:
                yield request_id, choices
            finally:
                self._note_answered(choices, call.prepared.body.n or 1)

    def _note_answered(self, choices: Sequence[Choice], num_per_prompt: int) -> None:
        for start in range(0, len(choices), num_per_prompt):
            own = choices[start : start + num_per_prompt]
            if all(choice.finish_reason is not None for choice in own):
                self._backend.note_answered([choice.num_tokens for choice in own])

    def _choices(self, call: _Call, request_id: str) -> list[Choice]:
        backend, prepared = self._backend, call.prepared
        body = prepared.body
        card, tokenizer = backend.card, backend.tokenizer
        ending = ending_of(body, card)
        tenant = tenant_of(call.context.tenant, body.cache_salt)
        seed = call.facts.seed if body.seed is None else body.seed
        context = call.context
        choices: list[Choice] = []
        has_several = len(prepared.prompts) * (body.n or 1) > 1
        header = call.context.headers.get(b"traceparent", b"")
        trace = read_traceparent(header, self._options.exports_traces)
        hints = body.vllm_xargs, body.agent_hint, body.prompt_cache_key
        program = program_of(context.headers, *hints)
        asked = context.tenant, body.priority, context.is_operator
        priority = self._rates.priority(*asked, program)
        for number, token_ids in enumerate(prepared.prompts):
            most, usual = call.facts.max_model_tokens, card.sampling.get("max_tokens")
            strict = self._options.strict_max_tokens
            max_tokens = max_tokens_of(body, len(token_ids), most, usual, strict)
            grammar = self._grammar(call, token_ids)
            for offset in range(body.n or 1):
                index = len(choices)
                drawn = max_tokens, seed + offset, card, prepared.bad_words
                sampling = sampling_of(body, ending, grammar, *drawn)
                request = Request(
                    request_id=RequestId(f"{request_id}~{index}" if index else request_id),
                    token_ids=token_ids,
                    sampling=sampling,
                    slo=call.limits.slo,
                    arrived_s=call.limits.arrived_s,
                    deadline_s=call.limits.deadline_s,
                    tenant=tenant,
                    adapter=card.adapter_of(body.model),
                    priority=priority,
                    use_cache=sampling.prompt_logprobs is None,  # cached tokens have no logits
                    trace=trace if trace is None or not index else beside(trace),
                    call=request_id if has_several else "",
                    program=program,
                )
                waits = grammar != prepared.grammar
                reader, shown = self._reader(call, token_ids, ending, index, waits)
                choice = Choice(index, request, ending, tokenizer, reader, shown)
                choice.answer_grammar = prepared.grammar
                choice.has_tools = prepared.tools is not None and prepared.tools.rules() is not None
                choice.hide_reasoning = body.include_reasoning is False
                choice.echo = prepared.echoes[number] if prepared.echoes else None
                choice.hide_output = body.max_tokens == 0
                choices.append(choice)
        return choices

    def _grammar(self, call: _Call, prompt: Sequence[int]) -> str:
        """Returns the grammar of an output: the call's grammar, after the reasoning if there is
        any."""
        grammar = call.prepared.grammar
        waits = self._backend.card.grammar_waits and call.facts.tells_reasoning
        if not grammar or not waits or call.prepared.tools is None:
            return grammar
        return self._model_output.grammar_behind_reasoning(grammar, prompt) or grammar

    def _reader(
        self,
        call: _Call,
        prompt: Sequence[int],
        ending: Ending,
        index: int,
        grammar_waits: bool,
    ) -> tuple[OutputReader | None, Mapping[int, str]]:
        """Returns the reader of a chat's output, and how special tokens look to the reader."""
        prepared = call.prepared
        if prepared.tools is None:  # a completion has no fields for reasoning or calls
            return None, {}
        grammar = prepared.grammar
        engine_decides = not self._backend.card.grammar_waits and is_json(grammar)
        may_reason = not grammar or grammar_waits or engine_decides
        return self._model_output.reader(
            prompt,
            ending.skip_special_tokens,
            prepared.tools.rules(),
            call.facts.id_source(index),
            # a head of an earlier release did not read reasoning
            reads_reasoning=may_reason and call.facts.tells_reasoning,
            may_not_reason=engine_decides,
        )

    async def _answer_at_once(
        self, call: _Call, choices: Sequence[Choice], answer: AnswerFormat, shape: Shape
    ) -> None:
        context = call.context
        texts: list[list[str]] = [[] for _ in choices]
        tokens: list[list[Token]] = [[] for _ in choices]
        calls: list[list[ToolCallDelta]] = [[] for _ in choices]
        reasoning: list[list[str]] = [[] for _ in choices]
        keep_tokens = answer.with_logprobs or answer.with_token_ids

        async def take(delta: Delta) -> None:
            index = delta.choice.index
            texts[index].append(delta.text)
            reasoning[index].append(delta.reasoning)
            calls[index].extend(delta.calls)
            if keep_tokens:
                tokens[index].extend(delta.tokens)

        async with context.watch():
            await self._run(call, choices, take)
        results = [
            (c, "".join(texts[i]), tokens[i], calls[i], "".join(reasoning[i]))
            for i, c in enumerate(choices)
        ]
        payload = whole_answer(answer, shape, results)
        await context.respond(200, payload, headers=_timing_headers(choices[0]))

    async def _stream(
        self, call: _Call, request_id: str, choices: Sequence[Choice], writer: EventWriter
    ) -> None:
        context = call.context
        resumed = call.resumption
        if resumed.position is not None:
            writer = self._numbered(call, resumed.position, request_id, choices, writer)
        elif resumed.client_tokens is not None and any(resumed.client_tokens):
            for choice in choices:
                choice.one_by_one = True
            writer = ResumedEvents(writer, resumed.client_tokens)
        try:
            silence = Silence(
                context, self._options.keepalive_s, partial(self._comment, call, choices)
            )
            async with context.watch(), silence:
                await self._run(call, choices, _sender(context, writer, silence))
            last = writer.end()
        except RequestRefused as refused:
            await _end_with_error(context, writer, from_refused(refused))
        except (ApiError, ClientGoneError):
            raise
        except Exception:
            logger.exception("request %s failed", context.request_id)
            await _end_with_error(context, writer, internal_error(context.request_id))
        else:
            if not context.started:
                await context.start_events()
            await context.end_events(last)

    def _comment(self, call: _Call, choices: Sequence[Choice]) -> bytes:
        """Returns the comment for a silent stream, or nothing while the call may still be
        refused."""
        running = [c.request.request_id for c in choices if c.finish_reason is None]
        stages = [self._backend.stage(request_id) for request_id in running]
        return comment_at(stages, call.context.started, call.kind == "messages")

    def _numbered(
        self,
        call: _Call,
        position: EventPosition,
        request_id: str,
        choices: Sequence[Choice],
        writer: EventWriter,
    ) -> NumberedEvents:
        """Gives the events ids that continue after the client's last event. Raises ApiError if that
        event is of another request."""
        for choice in choices:
            choice.one_by_one = True
        digest = digest_of_call(call.context.scope["path"], self._backend.card.model_id, choices)
        if position.progress and position.call != digest:
            raise another_call()
        start = EventPosition.of(call.facts, request_id, digest)
        return NumberedEvents(writer, start, len(choices), position.progress)


def _sender(context: HttpContext, writer: EventWriter, silence: Silence) -> Take:
    has_begun = False

    async def send(delta: Delta) -> None:
        nonlocal has_begun
        if silence.heard():
            await silence.settle()
        events = writer.events(delta) if has_begun else writer.begin() + writer.events(delta)
        has_begun = True
        if not context.started:
            catches_up = isinstance(writer, NumberedEvents | ResumedEvents) and writer.catches_up
            if not catches_up:  # after the client has caught up, an error has no status of its own
                await context.start_events()
        if events:
            await context.send_events(events)
        if silence.listens(bool(events)):
            await silence.repeat()

    return send


def _drawn(facts: StreamFacts) -> tuple[object, ...]:
    return facts.request_id, facts.seed, facts.created_s, facts.ids


async def _end_with_error(context: HttpContext, writer: EventWriter, error: ApiError) -> None:
    """Sends an error as an event, or raises it if the status line has not been sent."""
    if not context.started:
        raise error
    await context.end_events(writer.error(error))


def _timing_headers(choice: Choice) -> Headers:
    if not choice.timings_s:
        return ()
    text = ", ".join(f"{stage}={seconds:.6f}" for stage, seconds in choice.timings_s.items())
    return ((b"x-moonpool-timing", text.encode("ascii", "replace")),)
