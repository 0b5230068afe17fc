"""The OpenAPI document of the server, made from its routes and from the types of the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from moonpool.api.access.route_rules import RouteRule, rule_of
from moonpool.api.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeBody,
)
from moonpool.api.endpoints import DrainBody, installed_version
from moonpool.api.messages import CountTokensBody, MessagesBody
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.api.prompts import MOST_BAD_WORDS, ROLES
from moonpool.api.responses import ResponsesBody
from moonpool.api.sampling import (
    LARGEST_BIAS,
    LONGEST_STOP_CHARS,
    MOST_ALLOWED,
    MOST_BIASES,
    MOST_LISTED,
    MOST_STOPS,
    MOST_TOKENS,
    RANGES,
)
from moonpool.api.tools import MOST_TOOLS
from moonpool.protocol.model_offer import POOLING_PATHS

_POOLING = tuple(path for path in POOLING_PATHS if path != "/v1/embeddings")
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    **dict.fromkeys(_POOLING, ForwardedBody),
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
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
    "/v1/responses/input_tokens": "Count the prompt tokens of a response.",
    "/v1/messages": "Answer in Anthropic's format.",
    "/v1/messages/count_tokens": "Count the prompt tokens of a message.",
    "/v1/models": "List the models.",
    "/v1/models/{model_id}": "Describe one model.",
    "/tokenize": "Convert text or messages to token ids.",
    "/detokenize": "Convert token ids to text.",
    "/tokenizer_info": "What tokenizer_config.json says, with the chat template in use.",
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


_OF_BODIES = (408, 413, 415, 503)
_OF_CALLS = (*_OF_BODIES, 404, 429, 504)
_ERRORS: dict[str, tuple[int, ...]] = {
    "/v1/chat/completions": _OF_CALLS,
    "/v1/completions": _OF_CALLS,
    "/v1/embeddings": _OF_CALLS,
    **dict.fromkeys(_POOLING, _OF_CALLS),
    "/v1/responses": _OF_CALLS,
    "/v1/messages": _OF_CALLS,
    "/v1/responses/input_tokens": (*_OF_BODIES, 404, 504),
    "/v1/messages/count_tokens": (*_OF_BODIES, 404, 504),
    "/tokenize": (*_OF_BODIES, 404, 504),
    "/detokenize": (*_OF_BODIES, 404, 504),
    "/v1/models/{model_id}": (404,),
    "/explain/{request_id}": (404,),
    "/cluster/event_log": (404,),
    "/beliefs": (404,),
    "/ready": (503,),
    "/cluster/events": (503,),
    "/cluster/drain": (*_OF_BODIES, 409),
}
"""Error statuses in addition to those of `_refusals`. Any endpoint may respond 500, which is a
bug."""
_MESSAGES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


def openapi_document(routes: Sequence[BaseRoute]) -> bytes:
    """Returns the OpenAPI document as JSON."""
    known = (r for r in routes if isinstance(r, Route) and r.include_in_schema)
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
        path, rule = route.replace(":path}", "}"), rule_of(route)
        paths[path] = {
            method.lower(): _operation(path, method, of_path.get(path), rule)
            for method in sorted(methods - {"HEAD"})
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "moonpool", "version": installed_version(), "license": _LICENSE},
            "servers": [{"url": "/", "description": "The server that sent this document."}],
            "paths": paths,
            "components": {
                "schemas": _with_all_checks(components)
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
    """Returns the schema of an object with these fields, of the given JSON types, that may have
    other fields."""
    properties = {
        name: what if isinstance(what, dict) else {"type": what} for name, what in required.items()
    }
    return {"type": "object", "properties": properties, "required": list(required)}


_MODEL = {"id": "string", "object": {"const": "model"}, "created": "integer"}
_ANSWER = {"id": "string", "created": "integer", "model": "string", "choices": "array"}
_RESPONSES: dict[str, Any] = {
    "Model": _object(
        {
            **_MODEL,
            "owned_by": "string",
            "max_model_len": "integer",
            "default_sampling_params": "object",
        }
    ),
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
    "TokenizerInfo": _object({"tokenizer_class": "string", "chat_template": "string"}),
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
    "/v1/responses/input_tokens": "TokenCount",
    "/v1/messages/count_tokens": "TokenCount",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/tokenizer_info": "TokenizerInfo",
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


def _refusals(rule: RouteRule) -> set[int]:
    """Returns how a request may be refused before it reaches its handler."""
    found = {400}
    if rule.callers != "everybody":
        found |= {401, 403, 503}
    return found | {415} if rule.pages == "none" else found


def _responses(path: str, rule: RouteRule) -> dict[str, Any]:
    """Returns the responses of an operation, by status."""
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
    statuses = {*_ERRORS.get(path, ()), *_refusals(rule)}
    for error in sorted(statuses):
        found[str(error)] = {"description": HTTPStatus(error).phrase, "content": errors}
    if path in ("/health", "/ping"):
        found["503"] = {"description": "The cluster cannot serve", "content": {"text/plain": {}}}
    return found


def _operation(
    path: str, method: str, body: dict[str, Any] | None, rule: RouteRule
) -> dict[str, Any]:
    callers, where, pages, largest = rule.words
    name = path.strip("/").translate(str.maketrans("/{}.", "____")) or "index"
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": _SUMMARIES.get(path, ""),
        "description": f"For {callers}, from {where}. Web pages: {pages}. Body: {largest}.",
        "responses": _responses(path, rule),
    }
    if rule.callers == "everybody":
        found["security"] = []
    if "{" in path:
        parameter = path[path.index("{") + 1 : path.index("}")]
        found["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if body is not None and method == "POST":
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return found


# Checks of bodies beyond their types, made in `sampling` and `bodies`, because an error of the
# decoder would not tell the range.

Schema = dict[str, Any]


def _between(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


def _message(*roles: str) -> Schema:
    role = {"enum": sorted(roles)}
    return {"type": "object", "properties": {"role": role}, "required": ["role"]}


def _messages(*roles: str) -> Schema:
    return {"minItems": 1, "items": _message(*roles)}


_OF_ALL: dict[str, Schema] = {
    **{name: _between(least, most) for name, least, most in RANGES},
    "max_completion_tokens": _between(1, MOST_TOKENS),
    "max_output_tokens": _between(1, MOST_TOKENS),
    "stop": {"minLength": 1, "maxLength": LONGEST_STOP_CHARS, "maxItems": MOST_STOPS},
    "stop_sequences": {"maxItems": MOST_STOPS},
    "logit_bias": {
        "maxProperties": MOST_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", **_between(-LARGEST_BIAS, LARGEST_BIAS)},
    },
    "allowed_token_ids": {"minItems": 1, "maxItems": MOST_ALLOWED},
    "logprob_token_ids": {"minItems": 1, "maxItems": MOST_LISTED},
    "bad_words": {"maxItems": MOST_BAD_WORDS},
    "cache_salt": {"minLength": 1, "maxLength": 256},
    "truncate_prompt_tokens": {"anyOf": [{"const": -1}, {"minimum": 1}, {"type": "null"}]},
    "dimensions": {"minimum": 1},
    "prompt": {"minLength": 1, "minItems": 1},
    "input": {"minLength": 1, "minItems": 1},
    "tools": {"maxItems": MOST_TOOLS},
}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}
_OF_ONE: dict[str, dict[str, Schema]] = {
    "ChatBody": {
        "messages": _messages(*ROLES),
        "max_tokens": _between(1, MOST_TOKENS),
        "tool_choice": _CHOICE,
        **{name: {"enum": [None, *values]} for name, values in CHAT_NEUTRAL.items()},
    },
    "CompletionBody": {
        "max_tokens": _between(0, MOST_TOKENS),
        **{name: {"enum": [None, *values]} for name, values in COMPLETION_NEUTRAL.items()},
    },
    "ResponsesBody": {"tool_choice": _CHOICE},
    "MessagesBody": {
        "messages": _messages("user", "assistant", "system"),
        "max_tokens": _between(1, MOST_TOKENS),
    },
    "CountTokensBody": {"messages": _messages("user", "assistant", "system")},
    "TokenizeBody": {"messages": _messages(*ROLES)},
    "EmbeddingsBody": {"messages": _messages(*ROLES)},
}
_REQUIRED = {
    "ChatBody": ["messages"],
    "CompletionBody": ["prompt"],
    "ResponsesBody": ["input"],
    "MessagesBody": ["messages", "max_tokens"],
    "CountTokensBody": ["messages"],
    "DetokenizeBody": ["tokens"],
}


def _with_all_checks(components: dict[str, Schema]) -> dict[str, Schema]:
    """Returns the schemas of the bodies including what is checked after decoding."""
    return {name: _with_checks(name, schema) for name, schema in components.items()}


def _with_checks(name: str, schema: Schema) -> Schema:
    if not name.endswith("Body"):
        return schema
    fields = _OF_ALL | _OF_ONE.get(name, {})
    properties = {
        field: _joined(found, fields.get(field, {}))
        for field, found in schema.get("properties", {}).items()
    }
    required = _REQUIRED.get(name, [])
    for field in required:  # a null value is not enough
        properties[field] = _joined(properties[field], {"not": {"type": "null"}})
    return schema | {"properties": properties, "required": [*schema.get("required", []), *required]}


def _joined(found: Schema, checks: Schema) -> Schema:
    """Both hold. Joins two lists of alternatives, because a schema has only one."""
    if "anyOf" in found and "anyOf" in checks:
        return {**found, "allOf": [checks]}
    return found | checks
