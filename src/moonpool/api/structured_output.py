"""Structured output: converts the client's constraint to a grammar of llguidance.

A constraint comes from `response_format` (OpenAI), `structured_outputs` (vLLM), or tools of which
at least one must be called. The grammar travels with the request. Constraints are untrusted: only
llguidance reads them, first in a separate process (`grammars.check`). If llguidance gives up in the
middle of a response, the response ends and becomes an error instead of a 200.

llguidance and numpy are imported with the first constraint, because importing them would take a
quarter of the start of a process that reads bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from moonpool.api.bodies import ChatBody, CompletionBody, JsonSchemaFormat
from moonpool.api.errors import ApiError
from moonpool.api.grammars.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from moonpool.api.serving_backend import RequestRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 128 << 10
MOST_CHOICES = 1024
_INLINE_CHARS = 2048  # longer responses are checked in a thread
_ANY_OBJECT = {"type": "object"}
# White space between JSON's tokens is one or two spaces, or a line break with at most 12 characters
# of indentation. Without this bound, weak models might write white space forever.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": " {1,2}|\\r?\\n[ \\t]{0,12}",
}


def grammar_of(
    body: ChatBody | CompletionBody, can_end: bool, must_call: dict[str, Any] | None = None
) -> tuple[str, str]:
    """Returns the field that asks for structured output, or for tools that must be called, and its
    grammar.

    `must_call` is the schema of the required calls. With required calls, the calls are the whole
    output, so a schema of the answer has no effect. `can_end` says whether the model has a token
    that ends its output. The grammar is not compiled yet (see `grammars.check`). Raises `ApiError`.
    """
    if must_call is not None:
        name, grammar = "tool_choice", _json_grammar("tool_choice", must_call)
    else:
        name, grammar = _read(body)
    _check_length(name, grammar)
    if body.ignore_eos or body.min_tokens:
        other = "ignore_eos" if body.ignore_eos else "min_tokens"
        text = (
            f"'{other}' cannot be combined with '{name}': structured output ends when it is "
            f"complete. Leave one of them out."
        )
        raise ApiError(text, param=other)
    if not can_end:
        text = (
            f"This model has no token that ends its output, so '{name}' is not supported. "
            "Leave it out."
        )
        raise ApiError(text, param=name, code="unsupported_parameter")
    return name, grammar


async def check_satisfied(grammar: str, text: str) -> None:
    """Raises `RequestRefused` if a finished output does not satisfy the grammar."""
    from moonpool.text.grammar import matches_grammar

    if len(text) > _INLINE_CHARS:
        satisfied = await asyncio.to_thread(matches_grammar, grammar, text)
    else:
        satisfied = matches_grammar(grammar, text)
    if not satisfied:
        message = (
            "The output ended before it satisfied the requested structured output: the grammar "
            "became too complex to follow, or 'allowed_token_ids' and 'bad_words' left no token. "
            "Simplify the schema or grammar, or allow more tokens."
        )
        raise RequestRefused(400, "form_lost", message)


@cache
def _matcher() -> type[LLMatcher]:
    from llguidance import LLMatcher

    return LLMatcher


def _read(body: ChatBody | CompletionBody) -> tuple[str, str]:
    """Returns the name of the field that holds the constraint, and the grammar."""
    wanted, outputs = body.response_format, body.structured_outputs
    if outputs is None:
        assert wanted is not None
        if wanted.schema is not None and wanted.json_schema is None:
            return "response_format", _json_grammar("response_format", wanted.schema)
        if wanted.type == "json_object":
            return "response_format", _json_grammar("response_format", _ANY_OBJECT)
        if wanted.json_schema is None:
            text = "'response_format' of type 'json_schema' needs the field 'json_schema'."
            raise ApiError(text, param="response_format.json_schema")
        return "response_format", _schema_grammar(wanted.json_schema)
    if wanted is not None and wanted.type != "text":
        text = "Use either 'response_format' or 'structured_outputs', not both."
        raise ApiError(text, param="structured_outputs")
    given = {name: make for name, make in _GRAMMARS.items() if getattr(outputs, name) is not None}
    if len(given) != 1:
        text = f"'structured_outputs' needs exactly one of {', '.join(_GRAMMARS)}."
        raise ApiError(text, param="structured_outputs")
    ((name, make),) = given.items()
    return "structured_outputs", make(getattr(outputs, name))


def _schema_grammar(wanted: JsonSchemaFormat) -> str:
    schema = _ANY_OBJECT if wanted.schema is None else wanted.schema
    return _json_grammar("response_format", schema)


def _json_grammar(name: str, schema: Any) -> str:
    """Returns the grammar of a JSON schema, given as an object or as JSON text."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema must be a JSON object")
        return _matcher().grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise unusable(name, str(error)) from None


def _choice_grammar(choices: list[str]) -> str:
    if not 0 < len(choices) <= MOST_CHOICES or not all(choices):
        text = f"'structured_outputs.choice' needs 1 to {MOST_CHOICES} non-empty strings."
        raise ApiError(text, param="structured_outputs.choice")
    # One terminal compiles to an automaton, in which texts with a common beginning share states.
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _matcher().grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")


def _object_grammar(wanted: bool) -> str:
    if not wanted:
        text = "'structured_outputs.json_object' must be true or left out."
        raise ApiError(text, param="structured_outputs.json_object")
    return _json_grammar("structured_outputs", _ANY_OBJECT)


def _regex_grammar(regex: str) -> str:
    if not regex:
        raise _says_nothing("regex")
    return _matcher().grammar_from_regex(regex)


def _written_grammar(text: str) -> str:
    """Returns the grammar of a text in Lark or GBNF. Errors in a Lark grammar show when it is
    compiled."""
    if not text.strip():
        raise _says_nothing("grammar")
    if not is_gbnf(text):
        return _matcher().grammar_from_lark(text)
    _check_length("structured_outputs", text)
    try:
        return _matcher().grammar_from_lark(_FROM_GBNF + gbnf_to_lark(text))
    except GbnfError as error:
        text = f"The GBNF grammar in 'structured_outputs' is invalid: {error}."
        raise ApiError(text, param="structured_outputs") from None


def _says_nothing(name: str) -> ApiError:
    text = f"'structured_outputs.{name}' is empty, so it constrains nothing. Leave it out."
    return ApiError(text, param=f"structured_outputs.{name}")


def _check_length(name: str, grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        text = (
            f"The grammar of '{name}' has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} "
            "are allowed. Simplify the schema or grammar."
        )
        raise ApiError(text, param=name)


_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": lambda schema: _json_grammar("structured_outputs", schema),
    "json_object": _object_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _written_grammar,
}


def unusable(name: str, why: str, grammar: str = "") -> ApiError:
    """Returns the error for a call whose field `name` has a grammar that cannot be used. `grammar`:
    the value that `grammar_of` returned."""
    line = " ".join(why.split())[:300]
    for pattern, words in _IN_WORDS:
        line = pattern.sub(words, line)
    kind = "schema or grammar"
    if grammar.startswith(_FROM_GBNF):
        kind = "GBNF grammar"
    elif grammar and not grammar.startswith("{"):
        kind = "Lark grammar (GBNF has '::=' in its rules)"
    return ApiError(f"The {kind} in '{name}' is invalid: {line}", param=name)


_FROM_GBNF = "// from GBNF\n"
_IN_WORDS = (
    (
        re.compile(r"^NoExtensionBias$"),
        "a '$ref' leads back to itself, so the schema describes no value",
    ),
    (
        re.compile(r"^Pointer '(.*)' does not exist$"),
        r"a '$ref' points to '\1', which is not there",
    ),
    (
        re.compile(r"^Resource '(.*)' is not present in a registry.*$"),
        r"a '$ref' names '\1': only references within the schema are followed",
    ),
    (re.compile(r"^Unimplemented keys: \[(.*)\]$"), r"these keywords are not supported: \1"),
)
"""Messages of llguidance that do not help the author of a schema."""
