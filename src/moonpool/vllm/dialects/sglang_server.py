"""SGLang: prompts as token ids at `/generate`, and the client's own body at OpenAI's endpoints.

SGLang's radix cache has pages of `page_size` tokens. SGLang's KV events have vLLM's format, with
one block for each page; moonpool does not follow pages below LEAST_PAGE_TOKENS.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.protocol.model_offer import COMPLETIONS, ModelOffer, OfferedAdapter
from moonpool.types import MALFORMED, FinishReason, Token, TokenLogprobs
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.block_names import salt_of
from moonpool.vllm.dialect import DialectError, most_new_tokens, structured_outputs
from moonpool.vllm.dialects.endpoints import offered_paths
from moonpool.vllm.dialects.openai_server import read_listed
from moonpool.vllm.dialects.server_dialect import Asked, ServerDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.forwarded import forwarded_body
from moonpool.vllm.known_cache import PrefixCounts

COMPUTE = "/generate"
INFO_PATHS = ("/server_info", "/get_server_info")
"""The second one is older."""
LEAST_PAGE_TOKENS = 8
BLOCK_TOKENS = 16
_COUNTER = r"^sglang:{}(?:_total)?(?:\{{.*\}})? (\S+)$"
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Info(msgspec.Struct):
    """Fields of `/server_info`."""

    model_path: str
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    disable_radix_cache: bool | None = None
    dp_size: int | None = None
    tokenizer_path: str | None = None
    is_embedding: bool | None = None


class _Finish(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[list[Any]] | None = None
    output_top_logprobs: list[list[list[Any]] | None] | None = None
    output_token_ids_logprobs: list[list[list[Any]] | None] | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


_INFO = msgspec.json.Decoder(Info)
_EVENT = msgspec.json.Decoder(_Event)


def read_info(found: bytes) -> Info | None:
    """Returns None if this is not an answer of SGLang to `/server_info`."""
    try:
        return _INFO.decode(found)
    except MALFORMED:
        return None


class SglangDialect(ServerDialect):
    make = "SGLang"

    async def facts(self) -> VllmFacts:
        found = None
        for path in INFO_PATHS:
            found = found or read_info(await self.client.get(path, optional=True))
        listed = read_listed(await self.client.get("/v1/models"))
        own = [model for model in listed if not model.parent]
        if found is None or not own or not own[0].context:
            raise DialectError("its /server_info and /v1/models do not state model and context")
        if found.is_embedding:
            raise DialectError("it computes embeddings only: moonpool takes such models from vLLM")
        context = own[0].context
        page = found.page_size or 1
        block_tokens = page if page >= LEAST_PAGE_TOKENS else BLOCK_TOKENS
        assumed = []
        room = found.max_total_num_tokens or 0
        if not room:
            assumed.append(f"room for {context:,} tokens")
        if block_tokens != page:
            assumed.append(f"blocks of {block_tokens} tokens for its pages of {page}")
        offer = ModelOffer(
            found.tokenizer_path or found.model_path,
            tuple(dict.fromkeys(model.id for model in own)),
            context,
            await offered_paths(self.client, (COMPLETIONS,)),
            tuple(OfferedAdapter(model.id, model.id) for model in listed if model.parent),
            takes="either",
        )
        blocks = max((room or context) // block_tokens, 1) * max(found.dp_size or 1, 1)
        caches = not found.disable_radix_cache
        return VllmFacts(offer, block_tokens, blocks, caches, self.make, " and ".join(assumed))

    async def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        body = msgspec.json.encode(generate_fields(asked.work, asked.facts, asked.fingerprint))
        reader = _Reader(asked.work)
        events = self.client.answer(body, True, asked.work.traceparent, COMPUTE)
        async with contextlib.aclosing(events):
            async for event in events:
                yield reader.read(event)

    def call_body(self, asked: Asked) -> bytes:
        return forwarded_body(asked.work, asked.facts.model_id, asked.fingerprint)

    async def counts(self) -> PrefixCounts | None:
        """Returns None if the server was started without `--enable-metrics`."""
        metrics = (await self.client.get("/metrics", optional=True)).decode(errors="replace")
        found = [
            re.findall(_COUNTER.format(name), metrics, re.M)
            for name in ("prompt_tokens", "cached_tokens")
        ]
        if not found[0]:
            return None
        try:
            return PrefixCounts(*(sum(map(float, numbers)) for numbers in found))
        except ValueError:
            return None


def generate_fields(
    work: AttemptSpec, facts: VllmFacts, layout_fingerprint: bytes
) -> dict[str, Any]:
    """Returns the body for one attempt. Raises DialectError for what SGLang cannot do."""
    sampling = work.sampling
    num_done = len(work.token_ids) - work.num_prompt_tokens
    lacks = {
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
    }
    lacking = next((name for name, is_asked in lacks.items() if is_asked), "")
    if lacking:
        raise DialectError(f"moonpool has no {lacking} from SGLang", refused=True)
    if sampling.grammar and num_done:
        raise DialectError("structured output cannot continue after a fault; send it again")
    most = most_new_tokens(work, facts.offer.max_model_tokens)
    params: dict[str, Any] = {
        "max_new_tokens": most,
        "min_new_tokens": min(max(sampling.min_tokens - num_done, 0), most),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": (sampling.seed + num_done) & 0x7FFFFFFF,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar:
        params |= _constraint(sampling.grammar)
    fields: dict[str, Any] = {
        "input_ids": list(work.token_ids),
        "sampling_params": params,
        "stream": True,
    }
    salt = salt_of(layout_fingerprint, work.tenant, work.adapter)
    if not work.use_cache:
        salt = str(work.attempt_id)
    if salt is not None:
        fields["extra_key"] = salt
    if work.adapter:
        fields["lora_path"] = work.adapter
    if sampling.logprobs is not None:
        fields |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
        if sampling.logprob_token_ids:
            fields["token_ids_logprob"] = list(sampling.logprob_token_ids)
    return fields


def _constraint(grammar: str) -> dict[str, Any]:
    """Raises DialectError."""
    found = structured_outputs(grammar)
    if "json" in found:
        return {"json_schema": msgspec.json.encode(found["json"]).decode()}
    if "regex" in found:
        return {"regex": found["regex"]}
    raise DialectError("moonpool gives SGLang JSON schemas and regexes only", refused=True)


class _Reader:
    """Reads the events of one answer. Each event has all tokens so far, or with
    `--incremental-streaming-output` only the new ones; the event's count of all tokens tells the
    two forms apart."""

    def __init__(self, work: AttemptSpec) -> None:
        self._work = work
        self._seen = 0

    def read(self, event: bytes) -> EngineOutput:
        """Raises DialectError."""
        try:
            found = _EVENT.decode(event)
        except MALFORMED as error:
            raise DialectError(f"its response has another format: {error}") from None
        if found.error is not None:
            shown = found.error if isinstance(found.error, dict) else {"message": found.error}
            refused = shown.get("code") == 400
            raise DialectError(" ".join(str(shown.get("message")).split())[:300], refused)
        meta = found.meta_info
        total = meta.completion_tokens
        num_new = total - self._seen
        if not 0 <= num_new <= len(found.output_ids):
            raise DialectError("its tokens do not match their count")
        new = found.output_ids[len(found.output_ids) - num_new :]
        self._seen = total
        tokens = self._tokens(new, meta)
        return EngineOutput(self._work.attempt_id, tokens, _finish(meta.finish_reason))

    def _tokens(self, new: Sequence[int], meta: _Meta) -> tuple[Token, ...]:
        most = self._work.sampling.logprobs
        if most is None or not new:
            return tuple(Token(token_id=number) for number in new)
        drawn = _last(meta.output_token_logprobs, len(new))
        listed = self._work.sampling.logprob_token_ids
        tops = _last(
            meta.output_token_ids_logprobs if listed else meta.output_top_logprobs, len(new)
        )
        tokens = []
        for number, one, top in zip(new, drawn or (), tops or [None] * len(new), strict=False):
            pairs = tuple((int(pair[1]), _least(pair[0])) for pair in top or ())
            if listed:
                pairs = ((number, _least(one[0])), *(pair for pair in pairs if pair[0] != number))
            logprobs = TokenLogprobs(_least(one[0]), pairs if listed else pairs[:most])
            tokens.append(Token(token_id=number, logprobs=logprobs))
        if len(tokens) != len(new):
            raise DialectError("its log-probabilities do not match its tokens")
        return tuple(tokens)


def _last(found: list[Any] | None, count: int) -> list[Any] | None:
    return found[-count:] if found and len(found) >= count else None


def _least(logprob: float | None) -> float:
    return -9999.0 if logprob is None else logprob


def _finish(found: _Finish | None) -> FinishReason | None:
    if found is None:
        return None
    if found.type not in _FINISHES:
        raise DialectError(f"it ended the output early ({found.message or found.type!r})"[:300])
    return _FINISHES[found.type]
