"""The OpenAPI document of the server, made from its routes and from the types of the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from moonpool.api.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeBody,
)
from moonpool.api.endpoints import DrainBody, installed_version
from moonpool.api.messages import CountTokensBody, MessagesBody
from moonpool.api.responses import ResponsesBody

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/cluster/drain": DrainBody,
}
_SUMMARIES = {
    "/": "The live page, with a list of the endpoints.",
    "/v1/chat/completions": "Answer a chat, whole or as server-sent events.",
    "/v1/completions": "Continue prompts, whole or as server-sent events.",
    "/v1/embeddings": "Convert texts to vectors.",
    "/v1/responses": "Answer in OpenAI's format of responses.",
    "/v1/messages": "Answer in Anthropic's format.",
    "/v1/messages/count_tokens": "Count the prompt tokens of a message.",
    "/v1/models": "List the models.",
    "/v1/models/{model_id}": "Describe one model.",
    "/tokenize": "Convert text or messages to token ids.",
    "/detokenize": "Convert token ids to text.",
    "/health": "Status 200 if the cluster can serve.",
    "/ping": "The same as /health.",
    "/live": "Status 200 while the head runs.",
    "/ready": "Status 200 if requests should come here, else 503 with the reason.",
    "/load": "The number of generating calls.",
    "/metrics": "Metrics in Prometheus' format.",
    "/version": "The version of the server.",
    "/server_info": "The configuration of the server.",
    "/explain/{request_id}": "Where a request went and why, and where its time went.",
    "/cluster": "The instances with their pools and loads.",
    "/cluster/events": "A frame of the live page each second, as server-sent events.",
    "/cluster/event_log": "The last events of the Conductor, for `moonpool rewind`.",
    "/cluster/hot": "The most used prefixes.",
    "/reset_prefix_cache": "Forget all cached blocks that no request holds.",
    "/cluster/drain": "Let an instance hand over its hottest blocks and leave.",
    "/beliefs": "The learned corrections of cost estimates.",
    "/openapi.json": "This document.",
    "/docs": "A page that shows this document and sends requests.",
}
_EVENTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_TEXT = frozenset({"/reset_prefix_cache", "/metrics", "/health", "/ping"})
_JSON = "application/json"
_KINDS = {
    "/": "text/html",
    "/docs": "text/html",
    "/cluster/events": "text/event-stream",
    "/cluster/event_log": "application/octet-stream",
}


def openapi_document(routes: Sequence[BaseRoute]) -> bytes:
    """Returns the document as JSON."""
    known = (route for route in routes if isinstance(route, Route))
    return _document(tuple((route.path, frozenset(route.methods or ())) for route in known))


@cache
def _document(routes: tuple[tuple[str, frozenset[str]], ...]) -> bytes:
    bodies = list(_BODIES.values())
    schemas, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    of_path = dict(zip(_BODIES, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route, methods in routes:
        path = route.replace(":path}", "}")
        paths[path] = {
            method.lower(): _operation(path, method, of_path.get(path))
            for method in sorted(methods - {"HEAD"})
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "moonpool", "version": installed_version()},
            "paths": paths,
            "components": {
                "schemas": components | {"Error": _ERROR},
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"bearer": []}],
        }
    )


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def _operation(path: str, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    kinds = [_KINDS.get(path, "text/plain" if path in _TEXT else _JSON)]
    if path in _EVENTS:
        kinds.append("text/event-stream")
    name = path.strip("/").translate(str.maketrans("/{}.", "____")) or "index"
    failed = {"$ref": "#/components/schemas/Error"}
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": _SUMMARIES.get(path, ""),
        "responses": {
            "200": {"description": "Success", "content": {kind: {} for kind in kinds}},
            "default": {"description": "An error", "content": {_JSON: {"schema": failed}}},
        },
    }
    if "{" in path:
        parameter = path[path.index("{") + 1 : path.index("}")]
        found["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if body is not None and method == "POST":
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return found
