"""The OpenAPI document of the server, made from its routes and from the types of the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
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
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.api.responses import ResponsesBody
from moonpool.protocol.model_offer import POOLING_PATHS

_POOLING = tuple(path for path in POOLING_PATHS if path != "/v1/embeddings")
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    **dict.fromkeys(_POOLING, ForwardedBody),
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
    **dict.fromkeys(_POOLING, "As vLLM's, where a vLLM server that has it serves the model."),
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
    "/cluster/upgrade": "Replace the head by one from the code on disk.",
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


_OF_BODIES = (400, 408, 413, 415, 503)
_OF_CALLS = (*_OF_BODIES, 404, 429, 504)
_ERRORS: dict[str, tuple[int, ...]] = {
    "/v1/chat/completions": _OF_CALLS,
    "/v1/completions": _OF_CALLS,
    "/v1/embeddings": _OF_CALLS,
    **dict.fromkeys(_POOLING, _OF_CALLS),
    "/v1/responses": _OF_CALLS,
    "/v1/messages": _OF_CALLS,
    "/v1/messages/count_tokens": (*_OF_BODIES, 404, 504),
    "/tokenize": (*_OF_BODIES, 404, 504),
    "/detokenize": (*_OF_BODIES, 404, 504),
    "/v1/models/{model_id}": (404,),
    "/explain/{request_id}": (404,),
    "/ready": (503,),
    "/cluster/events": (503,),
    "/cluster/event_log": (403,),
    "/cluster/hot": (400, 403),
    "/reset_prefix_cache": (403,),
    "/cluster/drain": (*_OF_BODIES, 403, 409),
    "/cluster/upgrade": (403, 415),
    "/beliefs": (403,),
}
"""Error statuses besides 401. Any endpoint may also respond 500, which is a bug."""
_OPEN = frozenset(
    {
        "/",
        "/docs",
        "/version",
        "/openapi.json",
        "/load",
        "/metrics",
        "/health",
        "/ping",
        "/live",
        "/ready",
    }
)
"""They need no API key."""
_MESSAGES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


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
            "info": {"title": "moonpool", "version": installed_version(), "license": _LICENSE},
            "servers": [{"url": "/", "description": "The server that sent this document."}],
            "paths": paths,
            "components": {
                "schemas": components
                | {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
                | _RESPONSES,
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"bearer": []}],
        }
    )


_LICENSE = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
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


_MESSAGES_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


def _object(required: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these fields, of the given JSON types, and others."""
    properties = {
        name: what if isinstance(what, dict) else {"type": what} for name, what in required.items()
    }
    return {"type": "object", "properties": properties, "required": list(required)}


_MODEL = {"id": "string", "object": {"const": "model"}, "created": "integer"}
_ANSWER = {"id": "string", "created": "integer", "model": "string", "choices": "array"}
_RESPONSES: dict[str, Any] = {
    "Model": _object({**_MODEL, "owned_by": "string", "max_model_len": "integer"}),
    "ModelList": _object(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        }
    ),
    "ChatCompletion": _object(
        {**_ANSWER, "object": {"const": "chat.completion"}, "usage": "object"}
    ),
    "Completion": _object({**_ANSWER, "object": {"const": "text_completion"}, "usage": "object"}),
    "EmbeddingList": _object(
        {"object": {"const": "list"}, "data": "array", "model": "string", "usage": "object"}
    ),
    "Response": _object(
        {"id": "string", "object": {"const": "response"}, "status": "string", "output": "array"}
    ),
    "Message": _object(
        {
            "id": "string",
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "content": "array",
            "stop_reason": {"type": ["string", "null"]},
            "usage": "object",
        }
    ),
    "TokenCount": _object({"input_tokens": "integer"}),
    "Tokens": _object(
        {
            "count": "integer",
            "max_model_len": "integer",
            "tokens": {"type": "array", "items": {"type": "integer"}},
        }
    ),
    "Text": _object({"prompt": "string"}),
    "Live": _object({"live": "boolean"}),
    "Ready": _object({"ready": "boolean", "reason": {"type": ["string", "null"]}}),
    "Load": _object({"server_load": "integer"}),
    "Version": _object({"version": "string"}),
    "Cluster": _object({"instances": "array"}),
    "Prefixes": _object({"prefixes": "array"}),
    "Draining": _object({"draining": "string"}),
}
_RESPONSE_OF = {
    "/v1/models": "ModelList",
    "/v1/models/{model_id}": "Model",
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "Completion",
    "/v1/embeddings": "EmbeddingList",
    "/v1/responses": "Response",
    "/v1/messages": "Message",
    "/v1/messages/count_tokens": "TokenCount",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/live": "Live",
    "/ready": "Ready",
    "/load": "Load",
    "/version": "Version",
    "/cluster": "Cluster",
    "/cluster/hot": "Prefixes",
    "/cluster/drain": "Draining",
}


def _content(kind: str, schema: str | None) -> dict[str, Any]:
    found = {"schema": {"$ref": f"#/components/schemas/{schema}"}} if schema else {}
    return {kind: found}


def _responses(path: str) -> dict[str, Any]:
    """What an operation may respond, by status."""
    success = _content(
        _KINDS.get(path, "text/plain" if path in _TEXT else _JSON), _RESPONSE_OF.get(path)
    )
    if path in _EVENTS:
        success |= _content("text/event-stream", None)
    status = "202" if path == "/cluster/upgrade" else "200"
    found: dict[str, Any] = {status: {"description": "Success", "content": success}}
    errors = _content(_JSON, "MessagesError" if path in _MESSAGES else "Error")
    if path == "/ready":
        errors = _content(_JSON, "Ready")
    statuses = {*_ERRORS.get(path, ()), *(() if path in _OPEN else (401,))}
    for error in sorted(statuses):
        found[str(error)] = {"description": HTTPStatus(error).phrase, "content": errors}
    if path in ("/health", "/ping"):
        found["503"] = {"description": "The cluster cannot serve", "content": {"text/plain": {}}}
    return found


def _operation(path: str, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    name = path.strip("/").translate(str.maketrans("/{}.", "____")) or "index"
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": _SUMMARIES.get(path, ""),
        "responses": _responses(path),
    }
    if "{" in path:
        parameter = path[path.index("{") + 1 : path.index("}")]
        found["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if body is not None and method == "POST":
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return found
