"""llama-server of llama.cpp: prompts are sent as token ids to `/completion`, each in a separate
slot.

A stream leaves out the ids of tokens that end within a character, and sends their text with the
next token. The ids of such a text are requested at `/tokenize`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.protocol.model_offer import COMPLETIONS, ModelOffer, OfferedAdapter
from moonpool.types import MALFORMED, FinishReason, SamplingParams, Token, TokenLogprobs
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, most_new_tokens, structured_outputs
from moonpool.vllm.dialects.endpoints import offered_paths
from moonpool.vllm.dialects.server_dialect import Asked, ServerDialect, SlotUse
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.forwarded import forwarded_body
from moonpool.vllm.known_cache import PrefixCounts

BLOCK_TOKENS = 16
"""The server has no blocks; keys are made of this many tokens."""
COMPUTE = "/completion"
SAMPLERS = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""Samplers in vLLM's order. Any other sampler that a server was started with is switched off."""
AS_TEXT = {"logit_bias": [["a", 200.0]]}
"""Forces valid text as the answer to a meaningless prompt, because newer servers answer with an
error if the text is not UTF-8. Log-probabilities are those without this constraint."""
UNFINISHED, UNFINISHED_BYTES = "\ufffd", 3
"""Text that stands for an incomplete character."""
_SEED_MASK = (1 << 31) - 1
_FINISHES = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    total_slots: int
    model_path: str
    default_generation_settings: _Settings


class _Model(msgspec.Struct):
    id: str
    aliases: list[str] = []


class _Models(msgspec.Struct):
    data: list[_Model]


class Lora(msgspec.Struct):
    """An adapter that the server has loaded."""

    id: int
    path: str
    scale: float

    @property
    def name(self) -> str:
        return self.path.replace("\\", "/").rpartition("/")[2].removesuffix(".gguf")


class _Top(msgspec.Struct):
    id: int
    logprob: float | None = None


class _Drawn(msgspec.Struct):
    id: int
    logprob: float | None = None
    top_logprobs: list[_Top] = []


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Event(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    completion_probabilities: list[_Drawn] = []
    timings: _Timings | None = None
    error: Any = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_PROPS = msgspec.json.Decoder(_Props)
_MODELS = msgspec.json.Decoder(_Models)
_LORAS = msgspec.json.Decoder(list[Lora])
_EVENT = msgspec.json.Decoder(_Event)
_TOKENIZED = msgspec.json.Decoder(_Tokenized)


def is_props(found: bytes) -> bool:
    """Whether this is a llama-server's answer to `/props`."""
    try:
        _PROPS.decode(found)
    except MALFORMED:
        return False
    return True


class LlamaDialect(ServerDialect):
    make = "llama-server"

    def __init__(self, client: VllmClient) -> None:
        super().__init__(client)
        self.loras: tuple[Lora, ...] = ()
        self._queries = self._hits = 0

    async def facts(self) -> VllmFacts:
        try:
            props = _PROPS.decode(await self.client.get("/props"))
            models = _MODELS.decode(await self.client.get("/v1/models")).data
            loras = _LORAS.decode(await self.client.get("/lora-adapters", optional=True) or b"[]")
        except MALFORMED as error:
            raise DialectError(
                f"its answer has another format than llama-server's: {error}"
            ) from None
        context, slots = props.default_generation_settings.n_ctx, props.total_slots
        if context < 1 or slots < 1 or not models:
            raise DialectError(f"it states {slots} slots of {context} tokens")
        self.loras = tuple(lora for lora in loras if not lora.scale)
        first = models[0]
        offer = ModelOffer(
            root=props.model_path or first.id,
            names=tuple(dict.fromkeys((first.id, *first.aliases))),
            max_model_tokens=context,
            paths=await offered_paths(self.client, (COMPLETIONS,)),
            adapters=tuple(OfferedAdapter(lora.name, lora.path) for lora in self.loras),
            takes="either",
        )
        return VllmFacts(
            offer,
            BLOCK_TOKENS,
            slots * -(-context // BLOCK_TOKENS),
            make=self.make,
            num_slots=slots,
        )

    async def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        work, use = asked.work, asked.use
        fields = compute_fields(work, asked.facts.offer.max_model_tokens)
        if not asked.fingerprint:  # this request only measures the server
            fields |= AS_TEXT
        body = msgspec.json.encode(fields | self._own_fields(work, use))
        reader = _Reader(self, work, use)
        events = self.client.answer(
            body, streamed=True, traceparent=work.traceparent, path=COMPUTE, is_done=_is_last
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield await reader.read(event)
                if reader.is_cut:
                    return  # leaving ends the request at the server

    def call_body(self, asked: Asked) -> bytes:
        own, model = self._own_fields(asked.work, asked.use), asked.facts.model_id
        return forwarded_body(asked.work, model, asked.fingerprint, False, own)

    async def counts(self) -> PrefixCounts | None:
        """Returns counts of the answers to moonpool, because the server counts no hits itself."""
        return PrefixCounts(self._queries, self._hits)

    def note_hits(self, num_tokens: int, num_cached: int) -> None:
        self._queries += num_tokens
        self._hits += num_cached

    async def tokenize(self, text: str) -> list[int]:
        fields = {"content": text, "add_special": False, "parse_special": False}
        try:
            return _TOKENIZED.decode(await self.client.post("/tokenize", fields)).tokens
        except MALFORMED as error:
            raise DialectError(f"its /tokenize is not understood: {error}") from None

    def _own_fields(self, work: AttemptSpec, use: SlotUse | None) -> dict[str, Any]:
        """Returns the fields that clients may not set. An adapter that no one asks for is off."""
        lora = next((one for one in self.loras if one.name == work.adapter), None)
        scales = [] if lora is None else [{"id": lora.id, "scale": 1.0}]
        if use is None:
            return {"id_slot": -1, "cache_prompt": False, "lora": scales}
        return {"id_slot": use.slot, "cache_prompt": use.reuses, "lora": scales}


def compute_fields(work: AttemptSpec, context: int) -> dict[str, Any]:
    """Returns the fields of the body for one attempt, but for its slot. `context`: the number of
    tokens of a slot. Raises DialectError for what such a server cannot do."""
    sampling = work.sampling
    num_done = len(work.token_ids) - work.num_prompt_tokens
    lacks = _why_not(sampling, num_done)
    if lacks:
        raise DialectError(f"a llama-server {lacks}", refused=True)
    most = most_new_tokens(work, context)
    fields: dict[str, Any] = {
        "prompt": list(work.token_ids),
        "stream": True,
        "return_tokens": True,
        "n_predict": most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "seed": (sampling.seed + num_done) & _SEED_MASK,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context,
        "samplers": SAMPLERS,
        "mirostat": 0,
        "dynatemp_range": 0.0,
        "ignore_eos": sampling.ignore_eos or 0 < most <= sampling.min_tokens - num_done,
        "stop": [],
    }
    if sampling.logit_bias:
        fields["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias]
    if sampling.logprobs is not None:
        fields["n_probs"] = max(sampling.logprobs, 1)
    if sampling.grammar:
        fields["json_schema"] = structured_outputs(sampling.grammar)["json"]
    return fields


def _why_not(sampling: SamplingParams, num_done: int) -> str:
    """Returns which part of a request such a server cannot do, or "" if it can do all."""
    if sampling.prompt_logprobs is not None:
        return "has no log-probabilities of a prompt"
    if sampling.logprob_token_ids:
        return "has log-probabilities of the most likely tokens only, not of given ones"
    if sampling.allowed_token_ids:
        return "knows no allowed_token_ids"
    if sampling.bad_words:
        return "knows no bad_words"
    if 0 < sampling.min_tokens < sampling.max_tokens:
        return "knows no min_tokens"
    if sampling.grammar and num_done:
        return "cannot continue structured output after a fault; send the request again"
    if sampling.grammar and "json" not in structured_outputs(sampling.grammar):
        return "takes JSON schemas from moonpool, and no other grammar"
    return ""


def _is_last(event: bytes) -> bool:
    return b'"stop":true' in event.replace(b" ", b"")


class _Reader:
    """Reads the events of one answer."""

    def __init__(self, server: LlamaDialect, work: AttemptSpec, use: SlotUse | None = None) -> None:
        self._server = server
        self._use = use
        self._work = work
        self._seen = 0
        self.is_cut = False
        """Whether a stop token has come that the server does not know."""

    async def read(self, event: bytes) -> EngineOutput:
        """Raises DialectError and VllmError."""
        try:
            found = _EVENT.decode(event)
        except MALFORMED as error:
            raise DialectError(f"its response has another format: {error}") from None
        if found.error is not None:
            shown = found.error if isinstance(found.error, dict) else {"message": found.error}
            raise DialectError(" ".join(str(shown.get("message")).split())[:300])
        finish = None
        if found.stop:
            finish = _FINISHES.get(found.stop_type)
            if finish is None:
                raise DialectError(f"it ended the output early ({found.stop_type[:50]!r})")
            cached = 0 if found.timings is None else found.timings.cache_n
            self._server.note_hits(found.tokens_evaluated, cached)
            if self._use is not None:
                self._use.found_tokens = cached
        token_ids = await self._whole(found)
        tokens = self._tokens(token_ids, found.completion_probabilities)
        return self._until_stop(tokens, finish)

    async def _whole(self, found: _Event) -> Sequence[int]:
        """The ids of the event, and of the tokens that were left out before it."""
        missing = found.tokens_predicted - self._seen - len(found.tokens)
        self._seen = found.tokens_predicted
        if missing <= 0:
            return found.tokens
        if found.stop:  # the answer ends within a character, of which the tokens are unknown
            stand_in = (await self._server.tokenize(UNFINISHED))[-UNFINISHED_BYTES:]
            return (stand_in * missing)[:missing]
        token_ids = await self._server.tokenize(found.content)
        if token_ids and token_ids[-1:] == found.tokens[-1:]:
            # takes one token more, because some tokenizers begin a text with a space
            token_ids = token_ids[-missing - 1 :]
        return token_ids or found.tokens

    def _tokens(self, token_ids: Sequence[int], drawn: Sequence[_Drawn]) -> tuple[Token, ...]:
        most = self._work.sampling.logprobs
        if most is None or not token_ids:
            return tuple(Token(token_id=number) for number in token_ids)
        if [one.id for one in drawn] != list(token_ids):
            raise DialectError(
                "a llama-server leaves out the log-probabilities of tokens that end within a"
                " character, as here; ask without them",
                refused=True,
            )
        return tuple(
            Token(token_id=one.id, logprobs=TokenLogprobs(_least(one.logprob), _top(one, most)))
            for one in drawn
        )

    def _until_stop(self, tokens: tuple[Token, ...], finish: FinishReason | None) -> EngineOutput:
        """Cuts the output at a stop token, because such a server knows only the model's own."""
        stops = self._work.sampling.stop_token_ids
        for number, token in enumerate(tokens):
            if token.token_id in stops:
                self.is_cut = finish is None
                tokens, finish = tokens[: number + 1], FinishReason.STOP
                break
        return EngineOutput(self._work.attempt_id, tokens, finish)


def _top(drawn: _Drawn, most: int) -> tuple[tuple[int, float], ...]:
    return tuple((one.id, _least(one.logprob)) for one in drawn.top_logprobs[:most])


def _least(logprob: float | None) -> float:
    return -9999.0 if logprob is None else logprob


async def next_logprobs(client: VllmClient, prompt: Sequence[int], top: int) -> dict[int, float]:
    """Returns the most likely tokens after a prompt, computed without cached KVCache. Raises
    VllmError."""
    fields = {
        "prompt": list(prompt),
        "n_predict": 1,
        "n_probs": top,
        "temperature": 0.0,
        "samplers": SAMPLERS,
        "cache_prompt": False,
        "stream": False,
        **AS_TEXT,
    }
    try:
        found = _EVENT.decode(await client.post(COMPUTE, fields, timeout_s=60.0))
    except MALFORMED as error:
        raise VllmError(f"its response has another format: {error}") from None
    drawn = found.completion_probabilities
    return {one.id: _least(one.logprob) for one in drawn[0].top_logprobs} if drawn else {}
