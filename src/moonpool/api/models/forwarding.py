"""Calls that a vLLM server answers from the client's unchanged body: with images or sounds, with
answers in which the server itself finds tool calls or reasoning, or for models that generate
nothing.

The Conductor places such a call, counts its load and ends it like any other. If the server dies
before it has sent a part of its response, another server gets the call. After the first part, an
error ends the call.

No server can continue it either for a client that has lost its connection. If the same call is sent
again, it gets the complete answer if that is known; otherwise the answer is computed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import structs

from moonpool.api.bodies import CompletionBody, decode_body
from moonpool.api.body_process import Kind
from moonpool.api.call_headers import TimeLimits, limits_of, read_traceparent, tenant_of
from moonpool.api.choice import REPLAYED_PER_TURN
from moonpool.api.connection.kept_stream import Delivered
from moonpool.api.connection.silence import Silence, comment_at
from moonpool.api.errors import ApiError, ClientGoneError, from_refused, internal_error
from moonpool.api.http_context import HttpContext
from moonpool.api.messages import error_payload
from moonpool.api.models.endpoint import ModelEndpoint
from moonpool.api.models.forwarded_bodies import FORWARDED, ForwardedBody, may_hold_media
from moonpool.api.preparation import PreparedCall
from moonpool.api.program_identity import program_of
from moonpool.api.resume.event_ids import HEADER as EVENT_ID
from moonpool.api.resume.event_ids import RESUME as NUM_TOKENS
from moonpool.api.resume.event_ids import resume_tokens
from moonpool.api.sampling import check_range
from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import COMPLETIONS, MEDIA_PATHS
from moonpool.types import (
    PRIORITY_RANGE,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    Token,
)

logger = logging.getLogger(__name__)

MAX_FORWARDED_BYTES = 48 << 20
"""Size of the largest body, which goes to the instance in one frame."""
GENERATING = (COMPLETIONS, *MEDIA_PATHS)
EVENTS = b"text/event-stream"


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_WHOLE = msgspec.json.Decoder(_Whole)


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked call that is forwarded, and its limits."""

    context: HttpContext
    prepared: PreparedCall
    body: ForwardedBody
    raw: bytes
    limits: TimeLimits
    # the whole answer, if the client did not get all of it before its connection broke
    known: Sequence[Delivered] = ()

    @property
    def is_new(self) -> bool:
        """Whether no answer to the call is known, and no earlier head has begun it."""
        return not self.known and not _is_resumed(self.context)

    @property
    def streams(self) -> bool:
        return bool(self.body.stream) and self.generates

    @property
    def generates(self) -> bool:
        return self.path in GENERATING

    @property
    def path(self) -> str:
        path: str = self.context.scope["path"]
        return path


class Forwarder(ModelEndpoint):
    """Forwards calls of one model to its servers."""

    async def pool(self, context: HttpContext) -> None:
        """Answers a call of an endpoint for models that generate nothing. Raises ApiError (404) if
        no server has this endpoint."""
        path = context.scope["path"]
        if path not in self._backend.card.forwards:
            text = f"The model '{self._backend.card.model_id}' has no {path} here."
            raise ApiError(text, status=404, code="unsupported_endpoint")
        call = await self._call("pooling", context)
        assert call is not None
        await self._answer(call)

    async def takes(self, context: HttpContext) -> bool:
        """Answers a call with images or sounds, or with an answer that the servers parse by
        themselves. Returns False for any other call. Raises ApiError (404) if all calls go to the
        servers and none has this endpoint, and (400) for images or sounds that no server can
        take."""
        path, card = context.scope["path"], self._backend.card
        if path not in card.forwards:
            if card.forwards_all:
                text = f"The servers of the model '{card.model_id}' have no {path}."
                raise ApiError(text, status=404, code="unsupported_endpoint")
            return False
        if path == COMPLETIONS and not card.forwards_all:
            return False
        was_forwarded = _was_forwarded(context)
        if was_forwarded is None:
            was_forwarded = self._may_take(await self._raw(context))
        if not was_forwarded:
            return False
        call = await self._call("forwarded", context)
        if call is None:
            return False
        await self._answer(call)
        return True

    def _may_take(self, raw: bytes) -> bool:
        """Whether the call may have to be forwarded, so that its body must be read."""
        parses = self._backend.card.parses
        if self._backend.card.forwards_all:
            return True
        if may_hold_media(raw):
            return True
        if not parses or self._backend.why_not_forwarded():
            return False
        return "reasoning" in parses or b'"tools"' in raw

    async def _raw(self, context: HttpContext) -> bytes:
        most = min(self._options.max_body_bytes, MAX_FORWARDED_BYTES)
        return await context.read_ahead(most, self._options.body_timeout_s)

    async def _call(self, kind: Kind, context: HttpContext) -> _Call | None:
        limits = limits_of(context, self._backend)
        raw = await self._raw(context)
        if context.kept is not None:
            limits = limits.since(context.kept.opening.arrived_s)
        left_s = limits.left_s(self._backend.now())
        # for an answer that continues, only the bytes that were sent before matter
        if _was_forwarded(context):
            known = decode_body(FORWARDED, raw)
            prepared = PreparedCall(CompletionBody(), [(0,)], original=known, num_tokens=1)
        else:
            prepared = await self._bodies.call(kind, raw, context.party, left_s)
        if not prepared.prompts:
            return None
        refusal = self._backend.why_not_forwarded()
        if refusal:
            text = f"This server takes only text: {refusal}."
            raise ApiError(text, param="messages", code="unsupported_value")
        body: ForwardedBody = prepared.original
        check_range(body, "priority", *PRIORITY_RANGE)
        _check_position(context, bool(body.stream))
        digest = await context.digest(raw, is_forwarded=True)
        found = await context.known(digest, context.request_id, displaces=False)
        if found is not None and not _is_whole(found.deliveries):
            found = None
        if found is None and not _is_resumed(context):
            await self._rates.admit(context.tenant, limits.arrived_s)
        facts, num_returns = (found.facts, found.num_returns) if found else (None, 0)
        arrived_s, _ = context.keep_call(
            raw, limits.arrived_s, self._backend.card, facts, digest, num_returns
        )
        answer = found.deliveries if found else ()
        return _Call(context, prepared, body, raw, limits.since(arrived_s), answer)

    async def _answer(self, call: _Call) -> None:
        context = call.context
        num_tokens = call.prepared.num_tokens if call.is_new else 0
        with (
            self._rates.prompts(context.tenant, num_tokens),
            self._active.begin(context) as (_, scoped),
        ):
            request = self._request(call, RequestId(scoped))
            if call.streams:
                await self._stream(call, request)
            else:
                await self._answer_at_once(call, request)

    def _request(self, call: _Call, request_id: RequestId) -> Request:
        context, card, tokens = call.context, self._backend.card, call.prepared.prompts[0]
        left = max(card.max_model_tokens - len(tokens), 1)
        most = 1
        if call.generates:
            most = max(min(call.body.most_tokens or left, left), 1)
        header = context.headers.get(b"traceparent", b"")
        hints = call.body.vllm_xargs, call.body.agent_hint, call.body.prompt_cache_key
        program = program_of(context.headers, *hints)
        asked = context.tenant, call.body.priority, context.is_operator
        return Request(
            request_id=request_id,
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=most),
            slo=call.limits.slo,
            arrived_s=call.limits.arrived_s,
            deadline_s=call.limits.deadline_s,
            tenant=tenant_of(context.tenant, call.body.cache_salt),
            adapter=card.adapter_of(call.body.model),
            priority=self._rates.priority(*asked, program),
            trace=read_traceparent(header, self._options.exports_traces),
            forwarded=True,
            program=program,
        )

    async def _outputs(self, call: _Call, request: Request) -> AsyncGenerator[Output, None]:
        """Yields the outputs that are already known, or else those that the server sends. Each
        output is logged first. Raises RequestRefused, for instance if no server can send the
        missing part."""
        kept = call.context.kept
        known = call.known
        if kept is not None and kept.is_resumed:
            known = kept.deliveries()
        elif kept is not None:
            for delivery in known:
                kept.note(0, delivery.output())
        for number, delivery in enumerate(known, 1):
            yield delivery.output()
            if number % REPLAYED_PER_TURN == 0:
                await asyncio.sleep(0)
        if kept is not None:
            kept.raise_refusal(self._backend.note_refused)
        if known:
            if not _is_whole(known):
                text = (
                    "The server was replaced in the middle of this answer. Send the request again."
                )
                raise RequestRefused(503, "head_replaced", text)
            return
        try:
            async with aclosing(self._computed(call, request)) as outputs:
                async for output in outputs:
                    if kept is not None:
                        kept.note(0, output)
                    self._rates.spend(call.context.tenant, _num_tokens(call, output))
                    yield output
        except RequestRefused as refused:
            if kept is not None:
                kept.note_refused(refused)
            raise

    async def _computed(self, call: _Call, request: Request) -> AsyncGenerator[Output, None]:
        """Yields the parts of a stream, or the answer in one part, because only a complete answer
        can be sent again."""
        delivered = () if _is_resumed(call.context) else None
        sent = ForwardedCall(path=call.path, body=call.raw, is_exact=call.prepared.is_exact)
        tokens: list[Token] = []
        async with aclosing(self._backend.forward(request, sent, delivered)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.ABORT:
                    text = "The server aborted this request. Send it again."
                    raise RequestRefused(503, "aborted", text)
                if call.streams:
                    yield output
                    continue
                tokens += output.tokens
                if output.finish_reason is not None:
                    yield structs.replace(output, tokens=tuple(tokens))

    async def _answer_at_once(self, call: _Call, request: Request) -> None:
        context = call.context
        data = b""
        async with context.watch(), aclosing(self._outputs(call, request)) as outputs:
            async for output in outputs:
                data += _data(output)
        kind, _, whole = data.partition(b"\n")
        if call.is_new and self._rates.counts(context.tenant):
            self._settle(call, whole)
        await context.respond(200, whole, kind)

    def _settle(self, call: _Call, whole: bytes) -> None:
        """Counts the tokens of the prompt as the server has counted them."""
        try:
            usage = _WHOLE.decode(whole).usage
        except msgspec.MsgspecError:
            return
        if usage is not None and usage.prompt_tokens is not None:
            self._rates.spend(call.context.tenant, usage.prompt_tokens - call.prepared.num_tokens)

    async def _stream(self, call: _Call, request: Request) -> None:
        context = call.context
        next_comment = partial(self._comment, call, request.request_id)
        silence = Silence(context, self._options.keepalive_s, next_comment)
        try:
            async with (
                context.watch(),
                aclosing(self._outputs(call, request)) as outputs,
                silence,
            ):
                await _send(context, outputs, silence)
        except RequestRefused as refused:
            await _end_with_error(call, from_refused(refused))
        except Exception as error:
            if not context.started or isinstance(error, ApiError | ClientGoneError):
                raise
            logger.exception("request %s failed", context.request_id)
            await _end_with_error(call, internal_error(context.request_id))
        else:
            if not context.started:
                await context.start_events()
            await context.end_events(b"")

    def _comment(self, call: _Call, request_id: RequestId) -> bytes:
        stage = self._backend.stage(request_id)
        return comment_at([stage], call.context.started, call.path == "/v1/messages")


async def _send(
    context: HttpContext, outputs: AsyncGenerator[Output, None], silence: Silence
) -> None:
    is_first = True
    async for output in outputs:
        if silence.heard():
            await silence.settle()
        data = _data(output)
        if data and is_first:
            is_first = False
            data = data.partition(b"\n")[2]  # the first line is the content type
        if data:
            if not context.started:
                await context.start_events()
            await context.send_events(data)
        if silence.listens(bool(data)):
            await silence.repeat()


def _check_position(context: HttpContext, streams: bool) -> None:
    """Raises ApiError if the client wants only the rest of an answer, or ids for it."""
    has = resume_tokens(context.headers)
    header = NUM_TOKENS if has is not None and any(has) else ""
    if streams and EVENT_ID.lower().encode() in context.headers:
        header = EVENT_ID
    if header:
        text = (
            "A vLLM server makes this answer, and cannot go on in its middle. Send the request"
            f" without the header {header}: its answer comes whole."
        )
        raise ApiError(text, param=header, code="invalid_header")


def _is_whole(deliveries: Sequence[Delivered]) -> bool:
    return bool(deliveries) and deliveries[-1].finish is not None


def _was_forwarded(context: HttpContext) -> bool | None:
    """Whether an earlier head has forwarded the call, or None if no head has sent any of its
    answer."""
    deliveries = context.kept.deliveries() if context.kept is not None else []
    if not deliveries:
        return None
    return any(token.payload for one in deliveries for token in one.tokens)


def _is_resumed(context: HttpContext) -> bool:
    return context.kept is not None and context.kept.is_resumed


def _data(output: Output) -> bytes:
    return b"".join([token.payload for token in output.tokens])


def _num_tokens(call: _Call, output: Output) -> int:
    """Returns how many of the tokens count for the tenant."""
    return len(output.tokens) if call.generates else 0


async def _end_with_error(call: _Call, error: ApiError) -> None:
    """Sends an error as an event, or raises it if the status line has not been sent."""
    context = call.context
    if not context.started:
        raise error
    if call.path in ("/v1/chat/completions", COMPLETIONS):
        await context.end_events(b"data: " + error.payload() + b"\n\n")
        return
    payload = error.payload()
    if call.path == "/v1/messages":
        payload = error_payload(error, context.request_id)
    await context.end_events(b"event: error\ndata: " + payload + b"\n\n")
