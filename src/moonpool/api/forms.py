"""The form that an answer must have: from `response_format` (OpenAI's), `structured_outputs`
(vLLM's), or tools of which one must be called, to a grammar in llguidance's words, which travels
with the request.

Forms are outside data: they are only ever given to llguidance, which bounds its own work. One that
it gives up in the middle of an answer ends that answer, which is then an error, not a 200.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from moonpool.api.bodies import ChatBody, CompletionBody, JsonSchemaFormat
from moonpool.api.errors import ApiError
from moonpool.api.frontend import Refused
from moonpool.engine.grammar import LIMITS, keeps

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LONGEST_FORM_CHARS = 128 << 10
MOST_CHOICES = 1024
_INLINE_CHARS = 2048  # longer answers are checked off the event loop
_ANY_OBJECT = {"type": "object"}
# White space between JSON's tokens is free, but not without end: weak models never leave it.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ \\n\\t\\r]{1,20}",
}


def has_form(body: ChatBody | CompletionBody) -> bool:
    wanted = body.response_format
    return body.structured_outputs is not None or (wanted is not None and wanted.type != "text")


def grammar_of(
    body: ChatBody | CompletionBody, can_end: bool, must_call: dict[str, Any] | None = None
) -> str:
    """Of a body that has a form, or tools of which one must be called: `must_call` is then the
    schema of the calls. Takes milliseconds for large schemas, without the GIL. `can_end`: the model
    has a token that ends an answer. Raises `ApiError`."""
    if must_call is not None:
        if has_form(body):
            text = "A call that is required has a form already; leave 'response_format' out."
            raise ApiError(text, param="tool_choice")
        name, grammar = "tool_choice", _json_grammar("tool_choice", must_call)
    else:
        name, grammar = _read(body)
    if len(grammar) > LONGEST_FORM_CHARS:
        text = f"'{name}' is too large: {len(grammar)} characters, of {LONGEST_FORM_CHARS} allowed."
        raise ApiError(text, param=name)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        raise _unusable(name, messages[0])
    if body.ignore_eos or body.min_tokens:
        other = "ignore_eos" if body.ignore_eos else "min_tokens"
        text = f"'{other}' does not go with '{name}': an answer ends when its form is complete."
        raise ApiError(text, param=other)
    if not can_end:
        text = f"This model has no token that ends an answer, so '{name}' cannot be kept."
        raise ApiError(text, param=name, code="unsupported_parameter")
    return grammar


async def check_kept(grammar: str, text: str) -> None:
    """Raises `Refused` if an answer that has ended is not of that form."""
    if len(text) > _INLINE_CHARS:
        kept = await asyncio.to_thread(keeps, grammar, text)
    else:
        kept = keeps(grammar, text)
    if not kept:
        message = "The answer could not keep the form that was asked for: make that simpler."
        raise Refused(400, "form_lost", message)


def _read(body: ChatBody | CompletionBody) -> tuple[str, str]:
    """The field that says it, and the grammar."""
    wanted, outputs = body.response_format, body.structured_outputs
    if outputs is None:
        assert wanted is not None
        if wanted.type == "json_object":
            return "response_format", _json_grammar("response_format", _ANY_OBJECT)
        if wanted.json_schema is None:
            text = "'response_format' of type 'json_schema' needs a 'json_schema'."
            raise ApiError(text, param="response_format.json_schema")
        return "response_format", _schema_grammar(wanted.json_schema)
    if wanted is not None and wanted.type != "text":
        text = "'response_format' and 'structured_outputs' cannot both be given."
        raise ApiError(text, param="structured_outputs")
    given = {name: make for name, make in _FORMS.items() if getattr(outputs, name) is not None}
    if len(given) != 1:
        text = f"'structured_outputs' needs exactly one of {', '.join(_FORMS)}."
        raise ApiError(text, param="structured_outputs")
    ((name, make),) = given.items()
    return "structured_outputs", make(getattr(outputs, name))


def _schema_grammar(wanted: JsonSchemaFormat) -> str:
    schema = _ANY_OBJECT if wanted.schema is None else wanted.schema
    return _json_grammar("response_format", schema)


def _json_grammar(name: str, schema: Any) -> str:
    """`schema`: as JSON has it, or that as a text."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise _unusable(name, str(error)) from None


def _choice_grammar(choices: list[str]) -> str:
    if not 0 < len(choices) <= MOST_CHOICES or not all(choices):
        text = f"'structured_outputs.choice' needs 1 to {MOST_CHOICES} texts, none of them empty."
        raise ApiError(text, param="structured_outputs.choice")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {texts}")


def _object_grammar(wanted: bool) -> str:
    if not wanted:
        text = "'structured_outputs.json_object' is true or left out."
        raise ApiError(text, param="structured_outputs.json_object")
    return _json_grammar("structured_outputs", _ANY_OBJECT)


_FORMS: dict[str, Callable[[Any], str]] = {
    "json": lambda schema: _json_grammar("structured_outputs", schema),
    "json_object": _object_grammar,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice_grammar,
    "grammar": LLMatcher.grammar_from_lark,
}


def _unusable(name: str, why: str) -> ApiError:
    line = " ".join(why.split())[:300]
    return ApiError(f"The form in '{name}' cannot be used: {line}", param=name)
