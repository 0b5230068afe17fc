"""Tests valid calls: the client gets the right response, and the head the right request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_head import (
    ScriptedHead,
    call,
    chat,
    complete,
    events_of,
    one_by_one,
    spoken,
)

from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.text.tokenizers.byte import EOS_ID
from moonpool.types import FinishReason, Request, Slo, Token


def seed_speaks(request: Request) -> list[Output]:
    """Distinguishes the `n` requests of one call."""
    return spoken(f"seed {request.sampling.seed}")  # type: ignore[return-value]


def test_a_chat_answer_has_openais_shape() -> None:
    head = ScriptedHead(lambda _: spoken("Hel", "lo", cached_tokens=1))
    answer = chat(head, model="fake").json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert answer["prompt_token_ids"] is answer["prompt_logprobs"] is None  # like vLLM
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    head = ScriptedHead(lambda _: spoken("Hel", "lo"))
    chunks = events_of(chat(head, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stream_tells_its_usage_when_asked() -> None:
    timings = {"queue": 0.25}
    head = ScriptedHead(lambda _: spoken("Hello", cached_tokens=2, timings_s=timings))
    chunks = events_of(chat(head, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert chunks[-1]["moonpool"]["timings_s"] == timings


def test_usage_so_far_is_in_every_chunk_where_that_is_asked_for() -> None:
    head = ScriptedHead(lambda _: spoken("He", "llo", cached_tokens=2))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(chat(head, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 2, 5, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    alone = events_of(chat(head, stream=True, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in alone)


def test_biases_reach_the_engine_by_token_id() -> None:
    head = ScriptedHead()
    complete(head, logit_bias={"12": -100, "3": 1.5})
    assert head.requests[0].sampling.logit_bias == ((3, 1.5), (12, -100.0))


def test_a_completion_and_its_stream_have_openais_shape() -> None:
    head = ScriptedHead(lambda _: spoken("a", "b", finish=FinishReason.LENGTH))
    answer = complete(head).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
    ]
    choices = [chunk["choices"][0] for chunk in events_of(complete(head, stream=True))]
    assert [choice["text"] for choice in choices] == ["a", "b", ""]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_differ_in_seed_alone(stream: bool) -> None:
    head = ScriptedHead(seed_speaks)
    response = chat(head, n=3, seed=40, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in events_of(response):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["message"]["content"]
        assert response.json()["usage"]["prompt_tokens"] == 2
        assert response.json()["usage"]["completion_tokens"] == 21
    assert texts == ["seed 40", "seed 41", "seed 42"]
    assert len({request.request_id for request in head.requests}) == 3
    assert len({request.token_ids for request in head.requests}) == 1


def test_each_choice_of_a_stream_opens_and_closes_once() -> None:
    chunks = events_of(chat(ScriptedHead(lambda _: spoken("a", "b")), n=4, stream=True))
    for index in range(4):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in mine] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
            {"content": "b"},
            {},
        ]
        assert [choice["finish_reason"] for choice in mine] == [None, None, None, "stop"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("é€", [tuple("é€".encode())]),
    ],
)
def test_every_form_of_prompt(prompt: object, expected: list[tuple[int, ...]]) -> None:
    head = ScriptedHead()
    response = complete(head, prompt=prompt)
    assert response.status_code == 200
    assert [request.token_ids for request in head.requests] == expected
    assert len(response.json()["choices"]) == len(expected)


def test_prompts_times_n_are_numbered_prompt_by_prompt() -> None:
    head = ScriptedHead(lambda request: spoken(bytes(request.token_ids).decode()))
    answer = complete(head, prompt=["x", "y"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["x", "x", "y", "y"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
def test_echo_repeats_the_prompt(prompt: object) -> None:
    head = ScriptedHead(lambda _: spoken("!"))
    assert complete(head, prompt=prompt, echo=True).json()["choices"][0]["text"] == "Hi!"
    chunks = events_of(complete(head, prompt=prompt, echo=True, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hi", "!", ""]


def test_characters_are_never_cut_in_a_stream() -> None:
    head = ScriptedHead(lambda _: one_by_one("é€🎉".encode()))
    chunks = events_of(complete(head, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["é", "€", "🎉", ""]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    head = ScriptedHead(lambda _: one_by_one("a€".encode()[:-1]))
    assert complete(head).json()["choices"][0]["text"] == "a\ufffd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason"),
    [
        ({"stop": "lo w"}, "Hel", "stop", "lo w"),
        ({"stop": ["zz", "o", "wor"]}, "Hell", "stop", "o"),
        ({"stop": "lo w", "include_stop_str_in_output": True}, "Hello w", "stop", "lo w"),
        ({"stop": "€"}, "Hello world ", "stop", "€"),
        ({"stop": "€x"}, "Hello world €", "length", None),
        ({"stop": "o", "min_tokens": 6}, "Hello w", "stop", "o"),
        ({"stop": []}, "Hello world €", "length", None),
    ],
)
def test_stop_strings_across_tokens(
    fields: dict[str, object], text: str, reason: str, stop_reason: str | None, stream: bool
) -> None:
    head = ScriptedHead(lambda _: one_by_one("Hello world €".encode()))
    response = complete(head, stream=stream, **fields)
    if stream:
        choices = [chunk["choices"][0] for chunk in events_of(response)]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == reason
        assert choices[-1]["stop_reason"] == stop_reason
    else:
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
        assert choice["stop_reason"] == stop_reason
    assert head.aborted == [], "a complete answer is not aborted"
    if reason == "stop":  # the head learns that the answer ends, and after how many tokens
        said = text if fields.get("include_stop_str_in_output") else f"{text}{stop_reason}"
        name = response.headers["x-request-id"]
        assert head.finished == [(name, FinishReason.STOP, len(said.encode()))]
    else:
        assert head.finished == []


def test_the_end_token_counts_but_does_not_show() -> None:
    last = Output(tokens=(Token(EOS_ID),), finish_reason=FinishReason.STOP)
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), last])
    answer = complete(head, skip_special_tokens=False).json()
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a!")])
def test_a_stop_token_is_named_and_hidden(include: bool, text: str) -> None:
    last = Output(tokens=(Token(33),), finish_reason=FinishReason.STOP)
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), last])
    answer = complete(head, stop_token_ids=[33], include_stop_str_in_output=include).json()
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["stop_reason"] == 33
    assert head.requests[0].sampling.stop_token_ids == (33,)


def test_chat_logprobs_have_openais_shape() -> None:
    head = ScriptedHead(lambda _: one_by_one("é".encode(), logprobs=True))
    response = chat(head, logprobs=True, top_logprobs=2)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert head.requests[0].sampling.logprobs == 2
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][1] == {"token": " ", "logprob": -1.5, "bytes": [32]}
    streamed = events_of(chat(head, logprobs=True, top_logprobs=2, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [entry for part in parts if part for entry in part["content"]] == content


def test_completion_logprobs_have_openais_shape() -> None:
    head = ScriptedHead(lambda _: one_by_one(b"ab", logprobs=True))
    expected = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, " ": -1.5}, {"b": -0.5, " ": -1.5}],
        "text_offset": [0, 1],
    }
    assert complete(head, logprobs=1).json()["choices"][0]["logprobs"] == expected
    chunks = events_of(complete(head, logprobs=1, stream=True))
    offsets = [
        offset
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1]


def test_token_ids_come_back_when_asked_for() -> None:
    head = ScriptedHead(lambda _: spoken("ab"))
    answer = chat(head, return_token_ids=True, n=2).json()
    assert answer["prompt_token_ids"] == [72, 105], "once: the choices of a chat share their prompt"
    for choice in answer["choices"]:
        assert choice["token_ids"] == [97, 98] and "prompt_token_ids" not in choice
    chunks = events_of(chat(head, return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == [72, 105]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [97, 98], []]


def test_a_completion_has_its_prompts_token_ids_in_each_choice() -> None:
    head = ScriptedHead(lambda _: spoken("ab"))
    asked = {"return_token_ids": True, "prompt": ["Hi", "you"]}
    first, second = complete(head, **asked).json()["choices"]
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([72, 105], [121, 111, 117])
    assert first["token_ids"] == second["token_ids"] == [97, 98]
    choices = [chunk["choices"][0] for chunk in events_of(complete(head, **asked, stream=True))]
    assert [i for c in choices if c["index"] == 1 for i in c["token_ids"]] == [97, 98]
    prompts = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
    assert sorted(prompts) == [[72, 105], [121, 111, 117]]


def test_sampling_fields_reach_the_head() -> None:
    head = ScriptedHead()
    response = complete(
        head,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
    )
    assert response.status_code == 200
    sampling = head.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 7, 9)
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logprobs is None


def test_what_is_left_out_gets_a_default() -> None:
    head = ScriptedHead()
    chat(head)
    complete(head)
    chat(head, max_completion_tokens=5, max_tokens=9)
    chat(head, top_k=-1, top_p=0, seed=-1)
    first, second, third, fourth = (request.sampling for request in head.requests)
    assert first.max_tokens == 254, "a chat may fill the context"
    assert second.max_tokens == 16
    assert third.max_tokens == 5
    assert first.seed != second.seed, "drawn anew for each"
    assert (fourth.top_k, fourth.top_p) == (1, 1.0), "top_p 0 leaves the likeliest token alone"
    assert fourth.seed == 2**63 - 1


def test_tenant_service_levels_and_deadline_reach_the_head() -> None:
    head = ScriptedHead()
    head.now = lambda: 100.0
    call(
        head,
        "/v1/completions",
        {"prompt": "x", "cache_salt": "s"},
        headers={"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "40.5", "x-request-timeout-ms": "2000"},
    )
    complete(head)
    first, second = head.requests
    assert first.tenant == "/s"
    assert first.slo == Slo(ttft_s=1.5, tbt_s=0.0405)
    assert (first.arrived_s, first.deadline_s) == (100.0, 102.0)
    assert second.tenant == ""
    assert second.slo == head.slo.usual
    assert second.deadline_s == 160.0


def test_a_client_cannot_outstay_the_servers_own_limit() -> None:
    head = ScriptedHead()
    head.now = lambda: 0.0
    call(head, "/v1/completions", {"prompt": "x"}, headers={"x-request-timeout-ms": "9e9"})
    assert head.requests[0].deadline_s == head.request_timeout_s


def test_a_request_id_is_echoed_and_names_the_answer() -> None:
    head = ScriptedHead()
    body = {"prompt": "x"}
    response = call(head, "/v1/completions", body, headers={"x-request-id": "trace-1"})
    assert response.headers["x-request-id"] == "trace-1"
    assert response.json()["id"] == "cmpl-trace-1"
    assert head.requests[0].request_id == "trace-1"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "<script>", "", "a/b"])
def test_a_strange_request_id_is_replaced(bad: str) -> None:
    head = ScriptedHead()
    response = call(head, "/v1/completions", {"prompt": "x"}, headers={"x-request-id": bad})
    assert response.status_code == 200
    assert response.headers["x-request-id"] not in ("", bad)


def test_timings_stand_in_a_header() -> None:
    head = ScriptedHead(lambda _: spoken("x", timings_s={"queue": 0.25, "prefill": 1.5}))
    header = complete(head).headers["x-moonpool-timing"]
    assert header == "queue=0.250000, prefill=1.500000"


def test_parts_and_roles_become_one_text() -> None:
    head = ScriptedHead()
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": parts, "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ]
    assert chat(head, messages=messages).status_code == 200
    assert bytes(head.requests[0].token_ids) == b"ab\nc"


def test_what_a_request_leaves_open_is_drawn_as_the_model_says() -> None:
    head = ScriptedHead()
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    head.card = msgspec.structs.replace(head.card, sampling=said)
    assert complete(head).status_code == 200
    assert complete(head, temperature=0, top_k=-1, top_p=1, min_p=0.1).status_code == 200
    left_open, said_so = (request.sampling for request in head.requests)
    assert (left_open.temperature, left_open.top_k, left_open.top_p) == (0.6, 20, 0.95)
    assert left_open.repetition_penalty == said_so.repetition_penalty == 1.1
    assert (said_so.temperature, said_so.top_k, said_so.top_p, said_so.min_p) == (0, 0, 1, 0.1)


def test_a_chat_without_a_limit_has_the_models() -> None:
    """Without a limit, a chat would last until its deadline, because the built-in models do not end
    an answer."""
    head = ScriptedHead()
    head.card = msgspec.structs.replace(head.card, sampling={"max_tokens": 100.0})
    assert chat(head).status_code == complete(head).status_code == 200
    assert chat(head, max_tokens=120).status_code == 200
    head.card = msgspec.structs.replace(head.card, sampling={"max_tokens": 9000.0})
    assert chat(head).status_code == 200
    assert [request.sampling.max_tokens for request in head.requests] == [100, 16, 120, 254]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"structured_outputs": {"json": '{"type": "array"}'}},
        {"structured_outputs": {"regex": "a+b"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_a_form_goes_to_who_draws(ask: Any, fields: dict[str, Any]) -> None:
    head = ScriptedHead(lambda _: spoken("{", finish=FinishReason.LENGTH))
    assert ask(head, **fields).status_code == 200
    assert head.requests[0].sampling.grammar


@pytest.mark.parametrize("text", ["", "aab", "aa", "aabb"])
def test_an_answer_that_lost_its_form_is_an_error(text: str) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"regex": "a+b"}}
    head = ScriptedHead(lambda _: spoken(*text))
    answer = complete(head, **fields)
    if text == "aab":
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "form_lost"
    assert (len(head.aborted), head.reasons) == (1, ["form_lost"]), "it is no answer"
    cut = ScriptedHead(lambda _: spoken(*text, finish=FinishReason.LENGTH))
    assert complete(cut, **fields).json()["choices"][0]["finish_reason"] == "length"
    stopped = complete(ScriptedHead(lambda _: spoken(*text, "c")), stop="c", **fields)
    assert stopped.json()["choices"][0]["stop_reason"] == "c"


def test_a_model_that_cannot_end_an_answer_keeps_no_form() -> None:
    head = ScriptedHead()
    head.card = msgspec.structs.replace(head.card, eos_token_ids=())
    answer = complete(head, response_format={"type": "json_object"})
    assert answer.status_code == 400
    assert "no token that ends" in answer.json()["error"]["message"]


def test_fields_without_effect_are_ignored() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "kv_transfer_params": None,
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    assert chat(ScriptedHead(), **fields).status_code == 200


def test_the_priority_goes_with_the_request_and_is_bounded() -> None:
    head = ScriptedHead()
    assert chat(head, priority=-7).status_code == 200
    assert complete(head).status_code == 200
    assert [request.priority for request in head.requests] == [-7, 0]
    refused = complete(head, priority=2**31)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_before_the_first_token_has_its_own_status(stream: bool) -> None:
    head = ScriptedHead(lambda _: [RequestRefused(429, "ttft_slo", "too busy", retry_after_s=2.2)])
    response = chat(head, stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    error = response.json()["error"]
    assert error == {
        "message": "too busy",
        "type": "rate_limit_error",
        "param": None,
        "code": "ttft_slo",
    }


@pytest.mark.parametrize("status", [503, 429])
def test_a_refusal_always_says_when_to_come_back(status: int) -> None:
    head = ScriptedHead(lambda _: [RequestRefused(status, "no_capacity", "full")])
    assert chat(head).headers["retry-after"] == "1"


def test_a_refusal_in_mid_stream_is_an_event_and_the_end() -> None:
    head = ScriptedHead(
        lambda _: [*spoken("a", finish=None), RequestRefused(504, "deadline", "late")]
    )
    response = complete(head, stream=True)
    assert response.status_code == 200
    blocks = response.text.split("\n\n")
    assert '"text":"a"' in blocks[0]
    assert '"code":"deadline"' in blocks[1]
    assert blocks[2:] == [""], "no [DONE] after an error"


def test_a_refused_choice_ends_its_siblings() -> None:
    def script(request: Request) -> list[object]:
        if request.request_id.endswith("~1"):
            return [0.02, RequestRefused(503, "lost", "instance lost")]
        return [*spoken("a", finish=None), 60.0]

    head = ScriptedHead(script)  # type: ignore[arg-type]
    response = chat(head, n=3)
    assert response.status_code == 503
    assert len(head.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        [ValueError("a secret of the inside")],
        [Output(tokens=(Token(97),))],  # an answer without a finish reason
    ],
)
def test_a_fault_inside_is_a_500_that_tells_nothing(script: list[object], stream: bool) -> None:
    head = ScriptedHead(lambda _: script)  # type: ignore[arg-type,return-value]
    response = complete(head, stream=stream)
    if script[0].__class__ is ValueError or not stream:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
    else:
        assert '"code":"internal_error"' in response.text
    assert response.headers["x-request-id"] in response.text
    assert "secret" not in response.text
    assert "Traceback" not in response.text


def test_an_answer_the_server_gave_up_is_no_answer() -> None:
    head = ScriptedHead(lambda _: spoken("a", finish=FinishReason.ABORT))
    response = complete(head)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "aborted"


class BareOutputs:
    """An iterator that cannot be closed."""

    def __aiter__(self) -> BareOutputs:
        return self

    async def __anext__(self) -> Output:
        return Output(tokens=(Token(97),))


def test_an_iterator_that_cannot_be_closed_is_aborted_by_name() -> None:
    head = ScriptedHead()
    head.submit = lambda *_: BareOutputs()  # type: ignore[method-assign]
    response = call(head, "/v1/completions", {"prompt": "x", "stop": "aaa"})
    assert response.json()["choices"][0]["text"] == ""
    assert head.aborted == [response.headers["x-request-id"]]
