"""Tests that a client's mistake gets a 4xx with an error in OpenAI's form, and that the call does
not reach the head."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_head import ScriptedHead, call, chat, complete, one_by_one

from moonpool.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moonpool.api.serving_backend import ApiOptions
from moonpool.text.tokenizers.byte import ByteTokenizer

USER = {"role": "user", "content": "Hi"}
BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def assert_error(
    response: Any, status: int, param: str | None = None, code: str | None = None
) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]  # type: ignore[no-any-return]


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [5, 1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema({"type": "no type"})}, "response_format"),
        ({"response_format": json_schema({"$ref": "http://x/y"})}, "response_format"),
        ({"response_format": json_schema({"enum": ["x" * 140_000]})}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 4}, "min_tokens"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": " \n\t"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs"),
        ({"guided_grammar": ""}, "structured_outputs.grammar"),
        ({"guided_regex": ""}, "structured_outputs.regex"),
        ({"guided_choice": []}, "structured_outputs.choice"),
        ({"guided_json": ""}, "structured_outputs"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"best_of": 3}, "best_of"),
        ({"length_penalty": 1.2}, "length_penalty"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_bad_fields_are_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    head = ScriptedHead()
    assert_error(ask(head, **fields), 400, param)
    assert head.requests == []


def test_a_body_that_is_missing_is_said_to_be() -> None:
    answer = call(ScriptedHead(), "/v1/completions", raw=b"")
    assert "has no body" in answer.json()["error"]["message"]


class Richer(ByteTokenizer):
    """A tokenizer with one token more than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size += 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.vocab_size - 1]


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_token_that_the_model_lacks_is_refused(ask: Any) -> None:
    head = ScriptedHead(tokenizer=Richer())
    head.card = msgspec.structs.replace(head.card, vocab_size=259)
    assert "259" in ask(head).json()["error"]["message"]
    assert ask(head).status_code == 400
    assert head.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "king", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_bad_chat_fields_are_named(fields: dict[str, Any], param: str) -> None:
    head = ScriptedHead()
    assert_error(chat(head, **fields), 400, param)
    assert head.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a", 2]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, 259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_bad_completion_fields_are_named(fields: dict[str, Any], param: str) -> None:
    head = ScriptedHead()
    assert_error(complete(head, **fields), 400, param)
    assert head.requests == []


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"hello", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b'{"model": "\xff\xfe"}', "invalid_utf8"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"model": "a\x00b"}', "invalid_json"),
        (b"\xff\xfe{\x00}\x00", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"text"', "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", list(BODIES))
def test_bodies_that_are_not_json_objects(path: str, raw: bytes, code: str) -> None:
    assert_error(call(ScriptedHead(), path, raw=raw), 400, code=code)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"temperature": Infinity}', "invalid_json"),
        (b'{"temperature": 1e999}', "invalid_value"),
        (b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_numbers_and_nesting_that_json_cannot_hold(path: str, raw: bytes, code: str) -> None:
    assert_error(call(ScriptedHead(), path, raw=raw), 400, code=code)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ('{"max_tokens": 1' + "0" * 6000 + "}", "max_tokens"),
        ('{"max_tokens": -1' + "0" * 400 + "}", "max_tokens"),
        ('{"n": 1e999, "lora_request": null}', "n"),
        ('{"lora_request": null, "temperature": -1e999}', "temperature"),
        ('{"stop_token_ids": [1, 1e999]}', "stop_token_ids[1]"),
        ('{"logit_bias": {"1": 1e999}}', "logit_bias"),
        ('{"user": {"a": [1e999]}}', "user"),
        (
            '{"response_format": {"type": "text", "json_schema": {"schema": {"a": 1e999}}}}',
            "response_format.json_schema.schema",
        ),
        (
            '{"response_format": {"x": null, "type": "text", "json_schema": {"strict": 1e999}}}',
            "response_format.json_schema.strict",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_number_too_large_is_named(path: str, raw: str, param: str) -> None:
    text = assert_error(call(ScriptedHead(), path, raw=raw.encode()), 400, param)
    assert f"'{param}'" in text and "[...]" not in text
    assert len(text) < 200


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, "a '$ref' leads back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "a '$ref' leads back to itself"),
        ({"$ref": "#/x"}, "a '$ref' points to '/x', which is not there"),
        ({"$ref": "http://x/y"}, "only references within the schema are followed"),
        ({"not": {}}, 'these keywords are not supported: "not"'),
    ],
)
def test_an_unusable_schema_is_explained(schema: dict[str, Any], words: str) -> None:
    answer = complete(ScriptedHead(), response_format=json_schema(schema))
    assert words in assert_error(answer, 400, "response_format")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root = "a"', "The Lark grammar (GBNF has '::=' in its rules)"),
        ('root ::= "a', "The GBNF grammar in 'structured_outputs' is invalid: line 1: "),
        ("root ::= other", "the rule 'root' uses 'other', which is not defined."),
        ('root ::= "a"{999999}{9}', "GBNF grammar"),
        ("# nothing", "The Lark grammar"),
    ],
)
def test_an_unusable_grammar_is_explained_in_its_notation(grammar: str, words: str) -> None:
    answer = complete(ScriptedHead(), structured_outputs={"grammar": grammar})
    assert words in assert_error(answer, 400, "structured_outputs")


def test_a_prompt_beyond_the_context_is_told_its_size() -> None:
    text = assert_error(complete(ScriptedHead(), prompt="x" * 300), 400, "prompt")
    assert "maximum context length is 256 tokens" in text
    assert "300 tokens" in text


def test_prompt_and_answer_beyond_the_context_are_added_up() -> None:
    body = {"messages": [USER], "max_tokens": 255}
    strict = ApiOptions(strict_max_tokens=True)
    response = call(ScriptedHead(), "/v1/chat/completions", body, options=strict)
    text = assert_error(response, 400, "messages", "context_length_exceeded")
    assert "you requested 257 tokens (2 in the messages, 255 in the completion)" in text
    assert chat(ScriptedHead(), max_tokens=254).status_code == 200


def test_a_hopelessly_long_text_is_not_even_tokenised() -> None:
    head = ScriptedHead()
    head.tokenizer.encode = None  # type: ignore[method-assign,assignment]
    response = complete(head, prompt="x" * (256 * 512 + 1))
    assert_error(response, 400, "prompt", "context_length_exceeded")


def test_an_unknown_model_is_404() -> None:
    text = assert_error(complete(ScriptedHead(), model="gpt-9"), 404, "model", "model_not_found")
    assert "gpt-9" in text
    assert "fake" in text


def test_served_names_are_the_models_names() -> None:
    options = ApiOptions(served_names=("a", "b"))
    body = {"prompt": "x", "model": "b"}
    response = call(ScriptedHead(), "/v1/completions", body, options=options)
    assert response.json()["model"] == "b"
    body["model"] = "fake"
    assert call(ScriptedHead(), "/v1/completions", body, options=options).status_code == 404
    listed = call(ScriptedHead(), "/v1/models", method="GET", options=options).json()
    assert [model["id"] for model in listed["data"]] == ["a", "b"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method_is_405(method: str) -> None:
    response = call(ScriptedHead(), "/v1/completions", method=method)
    assert_error(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/completions/", "/v1/audio/speech"])
def test_a_wrong_path_is_404(path: str) -> None:
    assert_error(call(ScriptedHead(), path), 404, code="not_found")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
    ],
)
def test_content_types(content_type: str, status: int) -> None:
    headers = {"content-type": content_type}
    response = call(ScriptedHead(), "/v1/completions", {"prompt": "x"}, headers=headers)
    assert response.status_code == status


def test_compressed_bodies_are_refused() -> None:
    headers = {"content-encoding": "gzip"}
    response = call(ScriptedHead(), "/v1/completions", {"prompt": "x"}, headers=headers)
    assert_error(response, 415, code="unsupported_encoding")


def test_a_body_above_the_limit_is_413() -> None:
    options = ApiOptions(max_body_bytes=100)
    fits = json.dumps({"prompt": "x" * 86}).encode()
    assert len(fits) == 100
    path = "/v1/completions"
    assert call(ScriptedHead(), path, raw=fits, options=options).status_code == 200
    response = call(ScriptedHead(), path, raw=fits + b" ", options=options)
    assert_error(response, 413, code="body_too_large")


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-timeout-ms"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e300"])
def test_bad_service_levels_are_named(name: str, value: str) -> None:
    response = call(ScriptedHead(), "/v1/completions", {"prompt": "x"}, headers={name: value})
    assert_error(response, 400, name, "invalid_header")


def test_n_is_bounded_by_the_server() -> None:
    body = {"prompt": "x", "n": 5}
    options = ApiOptions(max_choices=4)
    assert_error(call(ScriptedHead(), "/v1/completions", body, options=options), 400, "n")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 3)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "auto", "fake", "assistant", "\x00", "{{"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "x"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(list(BODIES)))
    names = st.sampled_from(BODIES[path].__struct_fields__)
    body = {**GOOD[path], **draw(st.dictionaries(names, VALUES, max_size=4))}
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=5))] = 1
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:  # changes one byte of the input
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + bytes((draw(st.integers(0, 255)),)) + raw[at + 1 :]
    return path, raw


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_no_body_makes_the_server_fail(asked: tuple[str, bytes]) -> None:
    path, raw = asked
    head = ScriptedHead(lambda _: one_by_one("é!".encode(), logprobs=True))
    response = call(head, path, raw=raw)
    if response.status_code == 200:
        assert b"internal_error" not in response.content
    else:
        assert response.status_code in (400, 404)
        assert_error(response, response.status_code)
        assert head.requests == []
