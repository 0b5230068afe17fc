"""A server with OpenAI's endpoints that takes no token ids: Ollama, TensorRT-LLM, or another.

The server gets the client's own body. The content of its KVCache is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.protocol.model_offer import COMPLETIONS, ModelOffer
from moonpool.types import MALFORMED, FinishReason, Token
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.dialects.endpoints import offered_paths, takes_body
from moonpool.vllm.dialects.server_dialect import Asked, ServerDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.forwarded import forwarded_body

BLOCK_TOKENS = 16
ASSUMED_CONTEXT = 32_768
CONTEXTS = 64
"""How many whole contexts the server is assumed to hold at a time."""
CHAT = "/v1/chat/completions"


class Listed(msgspec.Struct, frozen=True):
    """A model in `/v1/models`, with the names that servers have for its context."""

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    max_context_length: int | None = None

    @property
    def context(self) -> int:
        names = ("max_model_len", "context_length", "context_window", "max_context_length")
        return next((found for name in names if (found := getattr(self, name))), 0)


class _Models(msgspec.Struct):
    data: list[Listed]


class _Loaded(msgspec.Struct):
    name: str = ""
    model: str = ""
    context_length: int = 0


class _AllLoaded(msgspec.Struct):
    models: list[_Loaded]


class _Shown(msgspec.Struct):
    model_info: dict[str, Any] = {}


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_MODELS = msgspec.json.Decoder(_Models)
_LOADED = msgspec.json.Decoder(_AllLoaded)
_SHOWN = msgspec.json.Decoder(_Shown)
_EVENT = msgspec.json.Decoder(_Event)


def read_listed(models: bytes) -> list[Listed]:
    """The models of `/v1/models`. Raises DialectError."""
    try:
        return _MODELS.decode(models).data
    except MALFORMED:
        raise DialectError(
            "its /v1/models lists no models: it has no API that moonpool knows"
        ) from None


class OpenAiDialect(ServerDialect):
    """`make`: the kind of server that was found. `takes_salt`: whether it keeps prompts with
    another `cache_salt` apart."""

    def __init__(
        self, client: VllmClient, make: str = "OpenAI-like server", takes_salt: bool = False
    ) -> None:
        super().__init__(client)
        self.make = make
        self._takes_salt = takes_salt

    async def facts(self) -> VllmFacts:
        listed = read_listed(await self.client.get("/v1/models"))
        names = [model.id for model in listed]
        if not names:
            raise DialectError("it has no model")
        if not self.client.model and len(names) > 1:
            raise DialectError(
                f"it has {len(names)} models; name one, as {self.client.url}#{names[0]}, and give"
                f" its URL again for each further one: {', '.join(names[:20])}"
            )
        name = self.client.model or names[0]
        model = next((one for one in listed if one.id == name), None)
        if model is None:
            raise DialectError(f"it has no model {name}, but {', '.join(names[:20])}")
        context = model.context or await self._context_of(name)
        surely = (COMPLETIONS,) if await takes_body(self.client, COMPLETIONS) else ()
        paths = await offered_paths(self.client, surely)
        if not paths:
            raise DialectError("it serves neither completions nor chats")
        assumed = ["what it has cached"]
        if not context:
            assumed.insert(0, f"a context of {ASSUMED_CONTEXT:,} tokens")
        context = context or ASSUMED_CONTEXT
        offer = ModelOffer(name, (name,), context, paths, takes="text")
        blocks = -(-context // BLOCK_TOKENS) * CONTEXTS
        words = " and ".join(assumed)
        return VllmFacts(offer, BLOCK_TOKENS, blocks, make=self.make, assumed=words)

    async def _context_of(self, name: str) -> int:
        """Returns the context as Ollama reports it: of the loaded model, or else of its file.
        Returns 0 if the server does not report it."""
        with contextlib.suppress(VllmError, *MALFORMED):
            for one in _LOADED.decode(await self.client.get("/api/ps")).models:
                if name in (one.name, one.model) and one.context_length:
                    return one.context_length
        with contextlib.suppress(VllmError, *MALFORMED):
            shown = _SHOWN.decode(await self.client.post("/api/show", {"model": name}))
            for key, value in shown.model_info.items():
                if key.endswith(".context_length") and isinstance(value, int) and value > 0:
                    return value
        return 0

    def call_body(self, asked: Asked) -> bytes:
        model, salted = asked.facts.model_id, self._takes_salt
        return forwarded_body(asked.work, model, asked.fingerprint, salted)

    async def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        """Sends a prompt of about the attempt's length and yields a placeholder token for each
        event with text. Only measurements come here, for which the content does not matter;
        clients' calls are forwarded."""
        work, facts = asked.work, asked.facts
        text = " ".join(f"{token:x}" for token in work.token_ids[: -(-len(work.token_ids) // 2)])
        is_chat = CHAT in facts.offer.paths
        path = CHAT if is_chat else COMPLETIONS
        prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        fields = {
            "model": facts.model_id,
            "max_tokens": work.sampling.max_tokens,
            "temperature": 0.0,
            "stream": True,
            **prompt,
        }
        events = self.client.answer(msgspec.json.encode(fields), streamed=True, path=path)
        async with contextlib.aclosing(events):
            async for event in events:
                yield _measured_output(work, event)


def _measured_output(work: AttemptSpec, event: bytes) -> EngineOutput:
    """Each event with text counts as a token. Raises DialectError."""
    try:
        found = _EVENT.decode(event)
    except MALFORMED as error:
        raise DialectError(f"its response has another format: {error}") from None
    if found.error is not None:
        raise DialectError(" ".join(str(found.error).split())[:300])
    tokens: tuple[Token, ...] = ()
    finish = None
    for choice in found.choices[:1]:
        if choice.text or choice.delta is not None:
            tokens = (Token(0),)
        if choice.finish_reason is not None:
            finish = FinishReason.LENGTH
    return EngineOutput(work.attempt_id, tokens, finish)
