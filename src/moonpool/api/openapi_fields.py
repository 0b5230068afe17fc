"""What the OpenAPI document says of the fields of bodies, beside their types.

Ranges and neutral values are those by which `sampling` and `bodies` check. They are no constraints
of the types, because an error of the decoder does not tell the range.
"""

from __future__ import annotations

from typing import Any

from moonpool.api.bodies import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from moonpool.api.prompts import MOST_BAD_WORDS, ROLES
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


def with_checks(components: dict[str, Schema]) -> dict[str, Schema]:
    """Returns the schemas of the bodies with what is checked after decoding."""
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
    for field in required:  # null is not enough
        properties[field] = _joined(properties[field], {"not": {"type": "null"}})
    return schema | {"properties": properties, "required": [*schema.get("required", []), *required]}


def _joined(found: Schema, checks: Schema) -> Schema:
    """Both hold. A schema has one list of alternatives."""
    if "anyOf" in found and "anyOf" in checks:
        return {**found, "allOf": [checks]}
    return found | checks
