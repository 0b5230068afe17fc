"""The JSON bodies that clients send: their fields and types, decoded strictly in one pass.

This module owns which fields exist. `sampling` and `generate` check ranges and meanings.
`check_unsupported` rejects a field that is listed here but not served, unless its value has no
effect. A field that is not listed is rejected too, unless it is null, false, empty or 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from moonpool.api.errors import ApiError


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # whether every chunk has the usage so far, as in vLLM
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers, which is never sent


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that every response satisfies, even if `strict` is false. `name` has no effect."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`schema`: the schema of the object, in llama.cpp's and Together's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, of which exactly one field is set. `grammar` is in Lark or in
    GBNF."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Fields that OpenAI or vLLM document and that do not change what is computed. Only two have an
    # effect: `include_reasoning` (false hides the reasoning), and `prompt_cache_key` (may name the
    # program; see `api.program_identity`).
    include_reasoning: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # Accepted only with a value that has no effect (see `_NEUTRAL`).
    best_of: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    detokenize: Any = None
    spaces_between_special_tokens: Any = None
    kv_transfer_params: Any = None
    # The program (agent) of the call; see `api.program_identity`.
    vllm_xargs: Any = None
    agent_hint: Any = None

    @property
    def has_structured_output(self) -> bool:
        """Whether a schema, a regular expression or a grammar constrains the output."""
        wanted = self.response_format
        return self.structured_outputs is not None or (wanted is not None and wanted.type != "text")


class ChatBody(GenerationBody, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Any = None
    prediction: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body has either `input` or vLLM's `messages`."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body has either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int] | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True, False),
    "kv_transfer_params": ({},),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**_NEUTRAL, "suffix": ("",)}

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*?)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<got>.+)`", re.DOTALL)

Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    """Decodes a body. Raises an `ApiError` that names the field at fault."""
    if not raw:
        raise ApiError("The request has no body. Send a JSON object.", code="invalid_json")
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            if not _UNKNOWN.match(str(error)):
                raise
            return decoder.decode(_without_neutral(raw, decoder.type))
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except UnicodeDecodeError:
        raise ApiError(
            "The request body is not valid UTF-8. Encode the JSON as UTF-8.", code="invalid_utf8"
        ) from None
    except RecursionError:
        raise ApiError(
            "The request body is nested too deeply. Use fewer levels.", code="invalid_json"
        ) from None
    except msgspec.DecodeError as error:
        text = str(error).removeprefix("JSON is malformed: ")
        if "truncated" in text:
            text = "it is truncated, or has an unpaired surrogate in a \\u escape"
        raise ApiError(
            f"The request body is not valid JSON: {text}.", code="invalid_json"
        ) from None


_GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names for the fields of `structured_outputs`."""
_GUIDED_HINTS = ("guided_decoding_backend", "guided_whitespace_pattern")


_GIVEN = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EMPTY = frozenset({b"null", b"false", b"{}", b"[]", b'""', b"0", b"0.0"})


def _is_empty(value: msgspec.Raw) -> bool:
    return bytes(value).translate(None, b" \t\r\n") in _EMPTY


def _without_neutral(raw: bytes, body_type: type[msgspec.Struct]) -> bytes:
    """Returns the body without unknown fields that are null, false, empty or 0, including those
    within its objects, and with vLLM's older names replaced. Called only for a body with an unknown
    field.

    Values are not decoded here, so that an error in a value is found where it is decoded.
    """
    given = _GIVEN.decode(raw)
    known = _field_types(body_type)
    outputs = given.get("structured_outputs")
    if "structured_outputs" in known and (outputs is None or _is_empty(outputs)):
        guided = {new: given.pop(old) for old, new in _GUIDED.items() if old in given}
        for hint in _GUIDED_HINTS:
            given.pop(hint, None)
        wanted = {name: value for name, value in guided.items() if bytes(value) != b"null"}
        if wanted:
            given["structured_outputs"] = msgspec.Raw(msgspec.json.encode(wanted))
    kept = {}
    for name, value in given.items():
        inner = known.get(name)
        if inner is not None and (within := bytes(value)).startswith(b"{"):
            value = msgspec.Raw(_without_neutral(within, inner))
        if name in known or not _is_empty(value):
            kept[name] = value
    return msgspec.json.encode(kept)


@cache
def _field_types(body_type: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct] | None]:
    """Returns the fields of a body, with the type of each field that is an object with known
    fields."""

    def struct_in(hint: Any) -> type[msgspec.Struct] | None:
        types = (hint, *get_args(hint))
        return next(
            (t for t in types if isinstance(t, type) and issubclass(t, msgspec.Struct)), None
        )

    return {name: struct_in(hint) for name, hint in get_type_hints(body_type).items()}


def check_unsupported(body: ChatBody | CompletionBody) -> None:
    """Raises `ApiError` for a field that would change the output and is not supported."""
    table = CHAT_NEUTRAL if isinstance(body, ChatBody) else COMPLETION_NEUTRAL
    for name, neutral in table.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise ApiError(
                f"This server does not support '{name}' with this value. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def _explain(text: str) -> ApiError:
    """Converts msgspec's error text to OpenAI's."""
    match = _AT.match(text)
    assert match is not None
    # A key of a free-form object is unknown here, so the error names the field that holds the
    # object.
    what, path = match["what"], (match["path"] or "").partition("[...]")[0] or None
    unknown = _UNKNOWN.match(what)
    if unknown:
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return ApiError(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    where = f"'{path}'" if path else "the request body"
    if what in ("Number out of range", "Integer value out of range"):
        text = f"Invalid value for {where}: the number is too large."
        return ApiError(text, param=path)
    expected = _EXPECTED.match(what)
    if expected:
        what = f"expected {expected['wanted']}, but got {expected['got']} instead"
    return ApiError(f"Invalid type for {where}: {what}.", param=path, code="invalid_type")


def missing_parameter(name: str) -> ApiError:
    return ApiError(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )
