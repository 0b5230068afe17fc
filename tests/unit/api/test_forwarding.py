"""Tests forwarded calls, which a vLLM server answers from the client's own body, with a head that a
test controls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scripted_head import ScriptedHead, Step, call, served, spoken

from moonpool.api.errors import ApiError
from moonpool.api.keys import TenantLimits
from moonpool.api.models.forwarded_bodies import MEDIA_TOKENS, ForwardedReader, may_hold_media
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output, RequestRefused
from moonpool.protocol.messages import ForwardedCall
from moonpool.protocol.model_offer import MEDIA_PATHS
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, Request, Token

CHAT = "/v1/chat/completions"
JSON_PART = b'application/json\n{"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":3}}'
SSE_PARTS = (b"text/event-stream\ndata: {}\n\n", b"data: [DONE]\n\n")
END = Output(finish_reason=FinishReason.STOP)


def parts(*payloads: bytes) -> list[Step]:
    return [Output(tokens=(Token(0, payload=one),)) for one in payloads]


def forwarding(*steps: Step, paths: tuple[str, ...] = (*MEDIA_PATHS, "/score")) -> ScriptedHead:
    head = ScriptedHead(lambda _: list(steps) or [*parts(JSON_PART), END])
    head.card = structs.replace(head.card, forwards=paths, max_model_tokens=4096)
    return head


def image(data: str = "AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def look(*content: Any, **more: Any) -> dict[str, Any]:
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"messages": [{"role": "user", "content": said}], **more}


def test_the_response_is_the_servers() -> None:
    head, body = forwarding(), look("Hi", image(), max_tokens=9)
    answer = call(head, CHAT, body)
    assert answer.status_code == 200
    assert answer.content == JSON_PART.partition(b"\n")[2]
    assert answer.headers["content-type"] == "application/json"
    (sent,) = head.calls
    assert sent == ForwardedCall(path=CHAT, body=json.dumps(body).encode())
    (request,) = head.requests
    assert request.forwarded
    assert request.sampling.max_tokens == 9
    assert request.num_prompt_tokens > MEDIA_TOKENS


def test_a_stream_is_passed_on_as_it_comes() -> None:
    head = forwarding(*parts(*SSE_PARTS), END)
    answer = call(head, CHAT, look(image(), stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content == b"data: {}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        (CHAT, b'data: {"error":'),
        ("/v1/responses", b'event: error\ndata: {"error":'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
    ],
)
def test_a_fault_after_the_first_part_is_one_error_of_the_api(path: str, begins: bytes) -> None:
    fault = RequestRefused(503, "engine_error", "it is gone")
    head = forwarding(*parts(SSE_PARTS[0]), fault)
    key = "input" if path == "/v1/responses" else "messages"
    body = {key: look(image())["messages"], "stream": True, "max_tokens": 4}
    answer = call(head, path, body)
    assert answer.status_code == 200
    assert answer.content.startswith(b"data: {}\n\n" + begins)
    assert answer.content.count(b"it is gone") == 1


def test_a_fault_before_the_first_part_has_its_status() -> None:
    for stream in (False, True):
        head = forwarding(RequestRefused(429, "ttft_slo", "too much", 3.0))
        answer = call(head, CHAT, look(image(), stream=stream))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"


def test_text_stays_with_the_head_whatever_it_says() -> None:
    for text in ('the word "image_url"', "plain"):
        head = forwarding(Output(tokens=(Token(65),)), END)
        assert call(head, CHAT, look(text)).status_code == 200
        assert not head.calls
        assert not head.requests[0].forwarded


TOOL = {"name": "f", "parameters": {"type": "object"}}
SAID = [{"role": "user", "content": "Hi there"}]


def parsing(*found: str) -> ScriptedHead:
    head = forwarding()
    head.card = structs.replace(head.card, parses=found)
    return head


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/responses", {"input": SAID, "tools": [{"type": "function", **TOOL}]}),
        ("/v1/responses", {"input": "Hi there", "tools": [{"type": "function", **TOOL}]}),
        (
            CHAT,
            {
                "messages": SAID,
                "tools": [{"type": "function", "function": TOOL}],
                "reasoning": {"effort": "low"},
            },
        ),
        ("/v1/messages", {"messages": SAID, "tools": [{"name": "f", "input_schema": {}}]}),
    ],
)
def test_calls_with_tools_go_to_servers_that_parse_them(path: str, fields: dict[str, Any]) -> None:
    """The head places such calls by the tokens that the server makes of them."""
    plain = call(own := ScriptedHead(), CHAT, {"messages": SAID})
    assert plain.status_code == 200
    head, body = parsing("tools"), {**fields, "max_tokens": 7, "thinking_token_budget": 3}
    assert call(head, path, body).status_code == 200
    (sent,) = head.calls
    assert (sent.path, json.loads(sent.body), sent.is_exact) == (path, body, True)
    assert head.requests[0].token_ids == own.requests[0].token_ids
    assert not call(head, path, {**body, "model": "nobody"}).is_success


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": SAID, "reasoning_effort": "none"}),
        ("/v1/responses", {"input": "Hi there", "reasoning": {"effort": "none"}}),
        ("/v1/messages", {"messages": SAID, "output_config": {"effort": "none"}, "max_tokens": 7}),
    ],
)
def test_the_effort_is_a_part_of_the_prompt_that_the_server_makes(
    path: str, fields: dict[str, Any]
) -> None:
    head = parsing("reasoning")
    head.tokenizer.use_chat_template("{{ messages[0].content }}{{ reasoning_effort }}")
    assert call(head, path, fields).status_code == 200
    assert head.calls[0].is_exact
    assert bytes(head.requests[0].token_ids) == b"Hi therenone"


def test_chats_without_tools_stay_with_the_head_unless_the_server_shows_reasoning() -> None:
    for found, is_forwarded in ((("tools",), False), (("reasoning",), True), ((), False)):
        head = parsing(*found)
        if not is_forwarded:
            head.script = lambda _: spoken("Hello")
        assert call(head, CHAT, {"messages": SAID, "user": '"tools"'}).status_code == 200
        assert bool(head.calls) is is_forwarded
    head = parsing("reasoning", "tools")
    head.no_forwarding = "prefill and decode run apart"
    head.script = lambda _: spoken("Hello")
    assert call(head, CHAT, {"messages": SAID}).status_code == 200
    assert not head.calls, "the head parses it"


def test_a_chat_that_the_head_cannot_render_is_estimated() -> None:
    head = parsing("reasoning")
    odd = [{"role": "user", "content": [{"type": "thinking", "thinking": "a b c d " * 9}]}]
    assert call(head, CHAT, {"messages": odd}).status_code == 200
    assert not head.calls[0].is_exact
    assert head.requests[0].num_prompt_tokens == 18
    assert call(head, CHAT, {"messages": 3}).status_code == 400


def test_a_large_chat_is_as_exact_as_a_small_one() -> None:
    head = parsing("reasoning")
    head.card = structs.replace(head.card, vocab_size=259, max_model_tokens=100_000)
    said = [{"role": "user", "content": "word " * 16_000}]
    with served(head, ApiOptions(tokenizer="bytes")) as url:
        assert httpx.post(f"{url}{CHAT}", json={"messages": said}, timeout=60).status_code == 200
    assert head.calls[0].is_exact
    assert head.requests[0].num_prompt_tokens >= 80_000


def test_without_a_server_that_takes_them_images_are_refused_with_a_reason() -> None:
    plain = ScriptedHead()
    answer = call(plain, CHAT, look(image()))
    assert answer.status_code == 400
    assert "only text content" in answer.text
    split = forwarding()
    split.no_forwarding = "prefill and decode run apart"
    answer = call(split, CHAT, look(image()))
    assert answer.status_code == 400
    assert "prefill and decode run apart" in answer.text


def test_names_and_priorities_are_checked_here() -> None:
    head = forwarding()
    assert call(head, CHAT, look(image(), model="nobody")).status_code == 404
    assert call(head, CHAT, look(image(), priority=2**40)).status_code == 400
    assert call(head, CHAT, look(image(), max_tokens="x")).status_code == 400
    assert not head.requests


def test_an_endpoint_that_no_server_has_is_404_with_the_models_name() -> None:
    head = forwarding()
    assert call(head, "/score", {"text_1": "a", "text_2": "b"}).status_code == 200
    answer = call(head, "/rerank", {"query": "a", "documents": ["b"]})
    assert answer.status_code == 404
    assert "'fake' has no /rerank" in answer.text
    assert call(ScriptedHead(), "/score", {"text_1": "a"}).status_code == 404


def test_a_model_that_only_pools_says_so() -> None:
    head = forwarding(paths=("/v1/embeddings",))
    head.card = structs.replace(head.card, generates=False)
    answer = call(head, CHAT, look("Hi"))
    assert answer.status_code == 404
    assert "generates no text. It has /v1/embeddings." in answer.text
    assert call(head, "/v1/embeddings", {"input": "x"}).status_code == 200


def test_a_tenants_tokens_are_those_that_the_server_counted() -> None:
    head = forwarding()
    options = ApiOptions(
        api_keys={"k": "ann"}, limits={"ann": TenantLimits(tokens_per_s=6.0)}
    )  # allows bursts of 60 tokens
    with served(head, options) as url:
        headers = {"authorization": "Bearer k"}
        answers = [
            httpx.post(f"{url}{CHAT}", json=look(image()), headers=headers, timeout=120)
            for _ in range(3)
        ]
    # The call is charged 50 tokens for the prompt and 1 for each part, although the prompt was
    # estimated at more than 512.
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_a_large_body_is_read_in_a_process_of_its_own() -> None:
    head = forwarding()
    head.card = structs.replace(head.card, vocab_size=259)
    with served(head, ApiOptions(tokenizer="bytes")) as url:
        body = look("Hi", image("A" * 300_000))
        assert httpx.post(f"{url}{CHAT}", json=body, timeout=60).status_code == 200
        assert head.calls[0].body == json.dumps(body, separators=(",", ":")).encode()
        score = {"text_1": "a", "text_2": "b " * 60_000}
        assert httpx.post(f"{url}/score", json=score, timeout=60).status_code == 200
    assert head.requests[1].num_prompt_tokens == 4095


# Estimated prompts:


def reader(most: int = 4096) -> ForwardedReader:
    card = ModelCard("m", 0, max_model_tokens=most, vocab_size=259, eos_token_ids=())

    def render(messages: Any) -> str:
        texts = [m["content"] for m in messages]
        if not all(texts):
            raise ApiError("no text")
        return "|".join(
            t if isinstance(t, str) else "".join(part["text"] for part in t) for t in texts
        )

    return ForwardedReader(card, render, ByteTokenizer().encode)


def tokens(body: dict[str, Any], most: int = 4096) -> tuple[int, ...]:
    raw = json.dumps(body).encode()
    assert may_hold_media(raw)
    found = reader(most).media(raw)
    assert found is not None
    assert len(found.token_ids) <= found.num_tokens
    return found.token_ids


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns the length of the common beginning of two prompts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_text_before_an_image_has_its_own_tokens_and_equal_images_equal_ones() -> None:
    first = tokens(look("A long beginning", image("AAAA"), "after"))
    same = tokens(look("A long beginning", image("AAAA"), "other"))
    another = tokens(look("A long beginning", image("BBBB"), "after"))
    begin = len(ByteTokenizer().encode("A long beginning", False))
    assert first[:begin] == tuple(ByteTokenizer().encode("A long beginning", False))
    assert shared(first, another) == begin
    assert shared(first, same) >= begin + MEDIA_TOKENS


def test_a_template_that_fails_leaves_an_estimate() -> None:
    empty = {"messages": [{"role": "user", "content": ""}, *look("x", image())["messages"]]}
    assert len(tokens(empty)) > MEDIA_TOKENS


def test_no_estimate_exceeds_the_context() -> None:
    raw = json.dumps({"input": ["word " * 4000] * 20}).encode()
    found = reader(100).pooling(raw)
    assert len(found.token_ids) == 99
    assert found.num_tokens > 20_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(messages=JSON, texts=JSON)
def test_any_json_is_an_estimate_or_one_error(messages: Any, texts: Any) -> None:
    body = {"messages": messages, "input": texts, "query": texts}
    for read in (reader().media, reader().pooling):
        try:
            found = read(json.dumps(body).encode())
        except ApiError:
            continue
        assert found is None or all(0 <= token < 2**31 for token in found.token_ids)


@given(st.integers(2, 5000))
def test_deep_nesting_is_one_error(depth: int) -> None:
    head = forwarding()
    raw = b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}],"x":%b%b}' % (
        b"[" * depth,
        b"]" * depth,
    )
    assert call(head, CHAT, raw=raw).status_code in (200, 400)
    pooled = b'{"text_1":%b%b}' % (b"[" * depth, b"]" * depth)
    assert call(head, "/score", raw=pooled).status_code in (200, 400)


def test_a_request_knows_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    head = forwarding()
    call(head, "/score", {"text_1": "a", "text_2": "b"})
    request: Request = head.requests[0]
    assert (request.sampling.max_tokens, request.forwarded) == (1, True)
