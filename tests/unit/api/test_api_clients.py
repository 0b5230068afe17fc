"""Tests that moonpool accepts the calls of other servers' clients: older names, neutral values,
origins."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted_head import ScriptedHead, call, chat, complete, events_of, served, spoken

from moonpool.api import body_process
from moonpool.api.bodies import ChatBody, JsonSchemaFormat, ResponseFormat
from moonpool.api.serving_backend import ApiOptions, Output, RequestRefused
from moonpool.api.structured_output import grammar_of
from moonpool.config.parse import parse_config
from moonpool.head.cluster_error import ClusterError
from moonpool.head.models.model_loading import ApiModel, load_model, system_fingerprint
from moonpool.text.grammar import matches_grammar
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, Token, TokenLogprobs

ORIGIN = {"origin": "https://page.example"}


@pytest.mark.parametrize("value", [None, {}, [], False])
def test_an_unknown_field_without_effect_passes(value: Any) -> None:
    assert chat(ScriptedHead(), vllm_xargs=value, lora_request=value).status_code == 200
    assert complete(ScriptedHead(), mm_processor_kwargs=value).status_code == 200


@pytest.mark.parametrize("value", [None, {}, [], False, ""])
def test_an_unknown_field_without_effect_passes_inside_another(value: Any) -> None:
    schema = {"name": "x", "schema": {"type": "integer"}, "x": value}
    wanted = {"type": "json_schema", "json_schema": schema, "y": value}
    head = ScriptedHead(lambda _: spoken("7"))
    assert chat(head, response_format=wanted).status_code == 200
    assert head.requests[0].sampling.grammar
    outputs = {"regex": "7", "disable_any_whitespace": value}
    assert complete(head, structured_outputs=outputs).status_code == 200
    refused = complete(head, structured_outputs={"regex": "7", "x": value, "y": 5})
    assert refused.json()["error"]["param"] == "structured_outputs.y"


def test_an_unknown_field_with_a_value_is_named_beside_one_without() -> None:
    refused = chat(ScriptedHead(), lora_request=None, temprature=0.5)
    assert refused.json()["error"]["param"] == "temprature"
    assert chat(ScriptedHead(), lora_request=None, temperature="x").status_code == 400
    assert chat(ScriptedHead(), include_reasoning=True, detokenize=True).status_code == 200


@pytest.mark.parametrize(
    ("old", "new", "value", "answer"),
    [
        ("guided_json", "json", {"type": "integer"}, "7"),
        ("guided_regex", "regex", "a+", "aa"),
        ("guided_choice", "choice", ["yes", "no"], "no"),
        ("guided_grammar", "grammar", 'start: "x"', "x"),
        ("guided_grammar", "grammar", 'root ::= "x" | root "y"', "xyy"),
    ],
)
def test_vllms_older_names_are_the_newer_ones(old: str, new: str, value: Any, answer: str) -> None:
    heads = [ScriptedHead(lambda _: spoken(answer)) for _ in range(2)]
    hint = {"guided_decoding_backend": "xgrammar"}
    assert complete(heads[0], **{old: value}, **hint).status_code == 200
    assert complete(heads[1], structured_outputs={new: value}).status_code == 200
    grammars = [head.requests[0].sampling.grammar for head in heads]
    assert grammars[0] == grammars[1] != ""


def test_only_named_origins_may_call() -> None:
    options = ApiOptions(allowed_origins=("https://page.example",), api_keys={"k": "ann"})
    asks = {**ORIGIN, "access-control-request-method": "POST"}
    path = "/v1/chat/completions"
    allowed = call(ScriptedHead(), path, method="OPTIONS", headers=asks, options=options)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    refused = call(ScriptedHead(), path, {}, headers=ORIGIN, options=options)
    assert refused.status_code == 401, "the page may read the error"
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    other = {**asks, "origin": "https://other.example"}
    assert call(ScriptedHead(), path, method="OPTIONS", headers=other, options=options).is_error
    plain = call(ScriptedHead(), "/health", method="GET", headers=ORIGIN)
    assert "access-control-allow-origin" not in plain.headers


def test_the_document_names_every_route_and_its_schemas() -> None:
    document = call(ScriptedHead(), "/openapi.json", method="GET").json()
    assert document["openapi"].startswith("3.1")
    listed = call(ScriptedHead(), "/", method="GET").text
    for path, operations in document["paths"].items():
        assert path.split("{")[0].rstrip("/") in listed
        for operation in operations.values():
            assert operation["summary"], path
    schemas = document["components"]["schemas"]
    references = set(_references(document))
    assert references and all(
        name.removeprefix("#/components/schemas/") in schemas for name in references
    )
    assert "messages" in schemas["ChatBody"]["properties"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
def test_the_documents_ranges_are_those_that_are_checked(path: str, body: dict[str, Any]) -> None:
    document = call(ScriptedHead(), "/openapi.json", method="GET").json()
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = media["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert set(schema["required"]) == set(body)
    num_checked = 0
    for field, found in schema["properties"].items():
        for limit, beyond in (("minimum", -1), ("maximum", 1)):
            if limit not in found:
                continue
            num_checked += 1
            given = body | ({"echo": True} if found[limit] == 0 and "prompt" in body else {})
            good = call(ScriptedHead(), path, given | {field: found[limit]})
            # left out, because with it the prompt exceeds the context
            if (field, limit) != ("min_tokens", "maximum"):
                assert good.status_code == 200, (field, good.text)
            bad = call(ScriptedHead(), path, given | {field: found[limit] + beyond})
            assert bad.status_code == 400, field
            assert bad.json()["error"].get("param", field) == field
    assert num_checked > 1


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [name for each in value.values() for name in _references(each)]
    return [name for each in value for name in _references(each)] if isinstance(value, list) else []


def test_the_prefix_cache_is_reset_by_a_plain_post_without_a_body() -> None:
    head = ScriptedHead()
    with served(head) as url:
        assert httpx.post(f"{url}/reset_prefix_cache").status_code == 200
        assert head.num_drops == 1
        assert httpx.get(f"{url}/reset_prefix_cache").status_code == 405
        for content in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"content-type": content}
            answer = httpx.post(f"{url}/reset_prefix_cache", content=b"x", headers=headers)
            assert answer.status_code == 415
    assert head.num_drops == 1


def test_the_load_counts_calls_under_way() -> None:
    assert call(ScriptedHead(), "/load", method="GET").json() == {"server_load": 0}


def likely(*top: tuple[int, float]) -> ScriptedHead:
    token = Token(97, TokenLogprobs(-0.1, top))
    return ScriptedHead(
        lambda _: [Output(tokens=(token,)), Output(finish_reason=FinishReason.LENGTH)]
    )


def test_tokens_of_equal_text_are_all_listed() -> None:
    # the last two candidates are parts of characters
    head = likely((97, -0.1), (0xE2, -2.0), (0xF0, -3.0))
    [choice] = complete(head, logprobs=3).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.1, "\ufffd": -2.0, "token_id:240": -3.0}]


def test_the_drawn_token_is_listed_first() -> None:
    [choice] = complete(likely((98, -0.05), (99, -0.2)), logprobs=2).json()["choices"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["a", "b", "c"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_written_as_ids_on_demand(stream: bool) -> None:
    fields = {"return_tokens_as_token_ids": True, "stream": stream}

    def first(response: Any) -> Any:
        if stream:
            return next(e["choices"][0] for e in events_of(response) if e["choices"][0]["logprobs"])
        return response.json()["choices"][0]

    found = first(complete(likely((97, -0.1)), logprobs=1, **fields))["logprobs"]
    assert found["tokens"] == ["token_id:97"]
    assert found["top_logprobs"] == [{"token_id:97": -0.1}]
    found = first(chat(likely((98, -2.0)), logprobs=True, top_logprobs=1, **fields))["logprobs"]
    assert found["content"][0]["token"] == "token_id:97"
    assert found["content"][0]["top_logprobs"][0]["token"] == "token_id:98"


def test_white_space_between_jsons_tokens_is_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    body = ChatBody(response_format=ResponseFormat("json_schema", JsonSchemaFormat(schema=schema)))
    _, grammar = grammar_of(body, can_end=True)
    for text in ('{"a":1}', '{"a": 1}', json.dumps({"a": 1}, indent=4), '{\r\n\t"a": 1\r\n}'):
        assert matches_grammar(grammar, text)
    for text in ('{   "a": 1}', '{\n\n"a": 1}', '{"a":\r\r1}', "{\n" + " " * 13 + '"a": 1}'):
        assert not matches_grammar(grammar, text)


def test_retry_after_is_said_only_where_waiting_can_help() -> None:
    hopeless = complete(ScriptedHead(lambda _: [RequestRefused(422, "ttft_slo", "never")]))
    assert hopeless.status_code == 422 and "retry-after" not in hopeless.headers
    assert hopeless.json()["error"]["type"] == "invalid_request_error"


def test_a_chat_template_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"

    async def load() -> ApiModel:
        config = parse_config(f'[model]\nchat_template = "{path}"\ndtype = "float32"')
        loaded = await load_model(config)
        assert loaded.reader is not None, "a process has loaded it first"
        loaded.reader.end()
        return loaded

    with pytest.raises(ClusterError, match="cannot be read"):
        asyncio.run(load())
    path.write_text("<{{ messages[0].content }}>{{ tools | length if tools }}")
    tokenizer = asyncio.run(load()).tokenizer
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.knows_tools
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<Hi>"


def test_large_bodies_are_rendered_by_the_same_template() -> None:
    start = body_process.BodyStart(
        tokenizer="bytes",
        parts=None,
        chat_template="<{{ messages[0].content }}>",
        vocab_size=259,
        served_names=(),
        max_choices=1,
        max_logprobs=1,
        yields=False,
    )
    tokenizer = body_process.open_tokenizer(start)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<Hi>"


def scorer(*outputs: Output) -> ScriptedHead:
    head = ScriptedHead(lambda _: [*outputs, Output(finish_reason=FinishReason.LENGTH)])
    head.card = msgspec.structs.replace(head.card, scores_prompts=True)
    return head


def test_an_echo_lists_the_logprobs_of_the_prompt_before_those_of_the_answer() -> None:
    prompt = (TokenLogprobs(-1.0, ((98, -1.0),)), TokenLogprobs(-2.0, ((97, -0.5),)))
    token = Token(100, TokenLogprobs(-0.25, ((100, -0.25),)), prompt)
    [choice] = complete(
        scorer(Output(tokens=(token,))), prompt="abc", echo=True, logprobs=1, max_tokens=1
    ).json()["choices"]
    assert choice["text"] == "abcd"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -1.0, -2.0, -0.25],
        "top_logprobs": [None, {"b": -1.0}, {"a": -0.5, "c": -2.0}, {"d": -0.25}],
        "text_offset": [0, 1, 2, 3],
    }


def test_a_chat_has_the_logprobs_of_its_prompt_once() -> None:
    scored = TokenLogprobs(-2.0, ((97, -0.5), (98, -1.0)), rank=7)
    head = scorer(Output(tokens=(Token(100, None, (scored,)),)))
    answer = chat(head, prompt_logprobs=2, n=2, max_tokens=1).json()
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    first, second = answer["prompt_logprobs"]
    assert first is None
    assert {name: entry["rank"] for name, entry in second.items()} == {"105": 7, "97": 1, "98": 2}


def test_an_answer_names_what_it_follows_from() -> None:
    head = ScriptedHead()
    head.card = msgspec.structs.replace(head.card, system_fingerprint="fp_12")
    for ask in (chat, complete):
        assert ask(head).json()["system_fingerprint"] == "fp_12"
        assert {c["system_fingerprint"] for c in events_of(ask(head, stream=True))} == {"fp_12"}


def test_the_fingerprint_follows_from_model_and_formats() -> None:
    def of(text: str) -> str:
        config = parse_config(text)
        return system_fingerprint(config, config.model.name)

    plain = of("")
    assert plain == of("[api]\nport = 9\n") and plain.startswith("fp_")
    others = {of('[model]\ndtype = "bfloat16"\n'), of('[model]\nname = "random:m30"\n')}
    assert len(others | {plain}) == 3


def test_no_tokens_are_answered_where_none_are_wanted() -> None:
    head = scorer(Output(tokens=(Token(100, None, (TokenLogprobs(-1.0),)),)))
    answer = complete(head, prompt="ab", echo=True, max_tokens=0, prompt_logprobs=0).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["prompt_logprobs"][1]["98"]["logprob"] == -1.0
    assert answer["usage"]["completion_tokens"] == 0
    [request] = head.requests
    assert request.sampling.max_tokens == 1 and not request.use_cache


@pytest.mark.parametrize(
    ("head", "fields", "words"),
    [
        (ScriptedHead(), {"echo": True, "logprobs": 1}, "does not compute"),
        (ScriptedHead(), {"prompt_logprobs": 1}, "does not compute"),
        (scorer(), {"prompt_logprobs": 1, "stream": True}, "not streamed"),
        (scorer(), {"prompt_logprobs": 21}, "between 0 and 20"),
        (scorer(), {"max_tokens": 0}, "0. It must be between 1 and 2147483647"),
        (scorer(), {"max_tokens": -1}, "-1. It must be between 1 and 2147483647"),
        (scorer(), {"max_tokens": -1, "echo": True}, "between 0 and 2147483647"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    head: ScriptedHead, fields: dict[str, Any], words: str
) -> None:
    response = complete(head, **fields)
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert head.requests == []
