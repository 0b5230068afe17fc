"""The endpoints that tell rather than answer: models, tokens, health, metrics, explanations."""

from __future__ import annotations

import importlib.metadata
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from moonpool.api.bodies import DetokenizeBody, TokenizeBody, decode_body, missing_parameter
from moonpool.api.errors import ApiError
from moonpool.api.exchange import Exchange
from moonpool.api.frontend import Frontend
from moonpool.api.generate import check_model
from moonpool.api.options import ApiOptions
from moonpool.api.prompts import PromptReader
from moonpool.api.sampling import check_token_ids

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
DEFAULT_HOT = 20
MAX_HOT = 1000
_ID_PREFIXES = ("chatcmpl-", "cmpl-")
_PAGE = b"""moonpool

POST /v1/chat/completions   POST /v1/completions   GET /v1/models
POST /tokenize              POST /detokenize
GET  /health   GET /metrics   GET /version   GET /server_info
GET  /cluster  GET /beliefs  GET /explain/{request_id}
GET  /cluster/hot            POST /cluster/drain
"""


class Inspector:
    """Reads from one frontend; changes nothing."""

    def __init__(self, frontend: Frontend, options: ApiOptions):
        self._frontend = frontend
        self._options = options
        self._names = options.served_names or (frontend.card.model_id,)
        self._prompts = PromptReader(frontend.tokenizer, frontend.card, options.thread_above_chars)

    async def page(self, exchange: Exchange) -> None:
        await exchange.respond(200, _PAGE, b"text/plain; charset=utf-8")

    async def models(self, exchange: Exchange) -> None:
        data = [self._model(name) for name in self._names]
        await _respond(exchange, {"object": "list", "data": data})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model_id"]
        check_model(name, self._names)
        await _respond(exchange, self._model(name))

    async def health(self, exchange: Exchange) -> None:
        await exchange.respond(200 if self._frontend.healthy() else 503, b"", b"text/plain")

    async def metrics(self, exchange: Exchange) -> None:
        text = self._frontend.metrics_text()
        await exchange.respond(200, text, CONTENT_TYPE_LATEST.encode())

    async def version(self, exchange: Exchange) -> None:
        await _respond(exchange, {"version": installed_version()})

    async def server_info(self, exchange: Exchange) -> None:
        await _respond(exchange, self._frontend.server_info())

    async def cluster(self, exchange: Exchange) -> None:
        await _respond(exchange, self._frontend.cluster())

    async def hot(self, exchange: Exchange) -> None:
        """`?limit=N`: so many prefixes at most."""
        query = parse_qs(exchange.scope.get("query_string", b"").decode("ascii", "replace"))
        text = query.get("limit", [str(DEFAULT_HOT)])[-1]
        if not text.isdigit() or not 1 <= int(text[:9]) <= MAX_HOT:
            raise ApiError(f"'limit' must be 1 to {MAX_HOT}.", status=400, param="limit")
        found = await self._frontend.hot_prefixes(int(text))
        await _respond(exchange, {"prefixes": found})

    async def beliefs(self, exchange: Exchange) -> None:
        await _respond(exchange, self._frontend.beliefs())

    async def explain(self, exchange: Exchange) -> None:
        """Takes a request id or the id of an answer."""
        asked = exchange.scope["path_params"]["request_id"]
        request_id = asked
        for prefix in _ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        found = self._frontend.explain(request_id)
        if found is None or not self._may_see(exchange, found):
            text = f"No request '{asked[:200]}' is known; only recent ones are kept."
            raise ApiError(text, status=404, param="request_id", code="request_not_found")
        await _respond(exchange, found)

    async def tokenize(self, exchange: Exchange) -> None:
        body = decode_body(_TOKENIZE, await self._read(exchange))
        check_model(body.model, self._names)
        if body.messages is not None:
            text = self._prompts.chat_text(
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=body.tools,
                arguments=body.chat_template_kwargs or {},
            )
            add_special_tokens = bool(body.add_special_tokens)
        elif body.prompt is not None:
            text = body.prompt
            add_special_tokens = body.add_special_tokens is not False
        else:
            raise missing_parameter("prompt")
        tokens = await self._prompts.encode(text, add_special_tokens, "prompt")
        tokenizer = self._frontend.tokenizer
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.token_bytes(t).decode("utf-8", "replace") for t in tokens]
        answer = {
            "count": len(tokens),
            "max_model_len": self._frontend.card.max_model_tokens,
            "tokens": tokens,
            "token_strs": strings,
        }
        await _respond(exchange, answer)

    async def detokenize(self, exchange: Exchange) -> None:
        body = decode_body(_DETOKENIZE, await self._read(exchange))
        check_model(body.model, self._names)
        if body.tokens is None:
            raise missing_parameter("tokens")
        check_token_ids(body.tokens, self._frontend.card.vocab_size, "tokens")
        text = self._frontend.tokenizer.decode(body.tokens, skip_special_tokens=False)
        await _respond(exchange, {"prompt": text})

    async def _read(self, exchange: Exchange) -> bytes:
        options = self._options
        return await exchange.read_body(options.max_body_bytes, options.body_timeout_s)

    def _may_see(self, exchange: Exchange, found: dict[str, Any]) -> bool:
        """With API keys, a tenant sees its own requests only."""
        if not self._options.api_keys:
            return True
        tenant = str(found.get("tenant", ""))
        return tenant.split("/", 1)[0] == exchange.tenant

    def _model(self, name: str) -> dict[str, Any]:
        card = self._frontend.card
        return {
            "id": name,
            "object": "model",
            "created": card.created_s,
            "owned_by": "moonpool",
            "root": card.model_id,
            "parent": None,
            "max_model_len": card.max_model_tokens,
        }


def installed_version() -> str:
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def _respond(exchange: Exchange, value: Any) -> None:
    await exchange.respond(200, msgspec.json.encode(value))
