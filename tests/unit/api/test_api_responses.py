"""OpenAI's client uses `/v1/responses`: text, calls of tools, forms, streams, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_head import ScriptedHead, call, one_by_one, served, spoken
from test_api_tools import CALL, TAGGED, ToolTokenizer, head_saying

from moonpool.api.serving_backend import RequestRefused
from moonpool.types import FinishReason

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


@contextmanager
def client_of(head: ScriptedHead) -> Iterator[openai.OpenAI]:
    with served(head) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(head: ScriptedHead, **fields: Any) -> httpx.Response:
    return call(head, "/v1/responses", {"model": "fake", "input": "Hi"} | fields)


def test_text_comes_back_with_what_it_cost() -> None:
    head = ScriptedHead(lambda _: spoken("Hel", "lo", cached_tokens=3))
    with client_of(head) as client:
        found = client.responses.create(
            model="fake", input="Hi", instructions="Be kind. ", max_output_tokens=9, temperature=0.5
        )
    assert found.output_text == "Hello" and found.status == "completed"
    assert found.usage is not None
    assert found.usage.input_tokens == len(b"Be kind. Hi") and found.usage.output_tokens == 5
    assert found.usage.input_tokens_details.cached_tokens == 3
    (request,) = head.requests
    assert bytes(request.token_ids) == b"Be kind. Hi"
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)
    assert found.model_dump()["output"][0]["role"] == "assistant"


def test_tokens_are_counted_before_an_answer() -> None:
    head = ScriptedHead(lambda _: spoken("Hello"))
    asked: dict[str, Any] = {"model": "fake", "input": "Hi", "instructions": "Be kind. "}
    with client_of(head) as client:
        counted = client.responses.input_tokens.count(**asked)
        assert not head.requests
        found = client.responses.create(**asked)
    assert found.usage is not None
    assert counted.input_tokens == found.usage.input_tokens == len(b"Be kind. Hi")
    assert counted.object == "response.input_tokens"
    refused = call(head, "/v1/responses/input_tokens", {"input": 3, "model": "fake"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("responses", {"context_management": [{"type": "compaction"}], "personality": "friendly"}),
        ("responses", {"prompt_cache_options": {"mode": "explicit"}}),
        ("chat/completions", {"prompt_cache_options": {"ttl": "30m"}}),
        ("messages", {"speed": "fast", "diagnostics": {"previous_message_id": "msg_1"}}),
    ],
)
def test_hints_of_hosted_models_have_no_effect(path: str, fields: dict[str, Any]) -> None:
    head = ScriptedHead(lambda _: spoken("Hello"))
    said = "Hi" if path == "responses" else [{"role": "user", "content": "Hi"}]
    body = {"model": "fake", "input" if path == "responses" else "messages": said}
    body |= {"max_tokens": 9} if path == "messages" else {}
    answer = call(head, f"/v1/{path}", body | fields)
    assert answer.status_code == 200, answer.text


def test_an_answer_that_was_cut_is_incomplete() -> None:
    head = ScriptedHead(lambda _: spoken("Hel", finish=FinishReason.LENGTH))
    with client_of(head) as client:
        found = client.responses.create(model="fake", input="Hi")
    assert found.status == "incomplete" and found.output[0].status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_a_stream_ends_in_what_would_have_come_at_once() -> None:
    text = f"Well.\n<tool_call>{CALL}</tool_call>"
    with client_of(head_saying(text)) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": [WEATHER]}
        events = list(client.responses.create(**asked, stream=True))
        whole = client.responses.create(**asked)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    first = kinds.index("response.function_call_arguments.delta")
    assert kinds[first - 1] == "response.output_item.added"
    assert set(kinds[first:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == "Well.\n"
    final = events[-1].response
    for found in (final, whole):
        message, made = found.output
        assert message.content[0].text == "Well.\n"
        assert made.name == "weather" and json.loads(made.arguments) == {"city": "Oslo"}
        assert found.usage == whole.usage


def test_an_empty_answer_has_an_empty_message() -> None:
    with client_of(ScriptedHead(lambda _: spoken(""))) as client:
        assert client.responses.create(model="fake", input="Hi").output_text == ""


class Pet(BaseModel):
    name: str


def test_forms_and_required_calls_go_to_who_draws() -> None:
    head = ScriptedHead(lambda _: spoken('{"name": "Ida"}'))
    with client_of(head) as client:
        found = client.responses.parse(model="fake", input="Hi", text_format=Pet)
    assert found.output_parsed == Pet(name="Ida")
    assert "name" in head.requests[0].sampling.grammar
    head = head_saying('{"city": "Oslo"}')
    with client_of(head) as client:
        named: Any = {"type": "function", "name": "weather"}
        found = client.responses.create(
            model="fake", input="Hi", tools=[WEATHER], tool_choice=named
        )
    assert found.output[0].type == "function_call"
    assert head.requests[0].sampling.grammar


def test_what_was_said_and_called_before_is_told_to_the_model() -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments.city }}"
        "{% endfor %}]{% endfor %}"
    )
    head = ScriptedHead(tokenizer=ToolTokenizer(template))
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    assert ask(head, input=given, tools=[WEATHER]).status_code == 200
    (request,) = head.requests
    assert bytes(request.token_ids) == b"[user:a][assistant:b!weatherOslo][tool:sunny]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 30}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"model": "other"}, "model"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    head = ScriptedHead(tokenizer=ToolTokenizer(TAGGED))
    response = ask(head, **fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
    assert head.requests == []


def test_a_refusal_has_its_status_and_a_late_failure_is_an_event() -> None:
    busy = ScriptedHead(lambda _: [RequestRefused(429, "ttft_slo", "too busy", retry_after_s=2)])
    for stream in (False, True):
        response = ask(busy, stream=stream)
        assert response.status_code == 429 and response.headers["retry-after"] == "2"
    lost = ScriptedHead(
        lambda _: [*spoken("Hel", finish=None), RequestRefused(503, "lost", "gone")]
    )
    lines = ask(lost, stream=True).text.strip().split("\n")
    assert lines[-2] == "event: error"
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["code"], last["message"]) == ("lost", "gone")
    with client_of(lost) as client, pytest.raises(openai.APIError):
        client.responses.create(model="fake", input="Hi")


THINKS = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}]{% endfor %}<think>\n"
    "{# </think> #}"
)


def test_reasoning_is_an_item_of_its_own_and_may_be_sent_back() -> None:
    text = f"why\n</think>\n\nWell.<tool_call>{CALL}</tool_call>"
    head = head_saying(text, THINKS)
    with client_of(head) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": [WEATHER]}
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        streamed = events[-1].response
        for found in (whole, streamed):
            thought, message, made = found.output
            assert (thought.type, thought.status, thought.summary) == ("reasoning", "completed", [])
            assert [part.text for part in thought.content] == ["why\n"]
            assert thought.content[0].type == "reasoning_text"
            assert message.content[0].text == "Well." and made.name == "weather"
            assert found.output_text == "Well."
            assert found.usage.output_tokens_details.reasoning_tokens == len("why\n")
        again = [*(item.model_dump(exclude_none=True) for item in whole.output)]
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}
        client.responses.create(
            model="fake",
            input=[{"role": "user", "content": "Hi"}, *again, result],
            tools=[WEATHER],
        )
    prompt = bytes(head.requests[-1].token_ids).decode()
    said = "[user:Hi][assistant:(why\n)Well.!weather][tool:sunny]"
    assert prompt == f"<tool_call>{said}<think>\n"
    kinds = [event.type for event in events if event.type.startswith("response.reasoning")]
    assert set(kinds[:-1]) == {"response.reasoning_text.delta"} and len(kinds) > 3
    assert kinds[-1] == "response.reasoning_text.done"
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "why\n"
    first = next(i for i, e in enumerate(events) if e.type == "response.reasoning_text.delta")
    assert [e.type for e in events[first - 2 : first]] == [
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_openais_stream_helper_adds_reasoning_up() -> None:
    head = head_saying("why</think>Well.", THINKS)
    with (
        client_of(head) as client,
        client.responses.stream(model="fake", input="Hi") as stream,
    ):
        found = stream.get_final_response()
    assert found.output_text == "Well." and found.output[0].content[0].text == "why"


def test_items_keep_the_order_of_the_output_when_tokens_come_together() -> None:
    text = f"why</think>a<tool_call>{CALL}</tool_call>b<tool_call>{CALL}</tool_call>"
    head = ScriptedHead(lambda _: spoken(text), ToolTokenizer(THINKS))
    whole = ask(head, tools=[WEATHER]).json()
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    texts = [i["content"][0]["text"] for i in whole["output"] if i["type"] == "message"]
    assert texts == ["a", "b"]


@pytest.mark.parametrize(
    ("items", "prompt"),
    [
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}]}], ""),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
          {"role": "user", "content": "b"}], "[user:b]"),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
          {"role": "assistant", "content": "b"}], "[assistant:(a)b]"),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
          {"type": "reasoning", "summary": []},
          {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}]},
          {"role": "assistant", "content": "b"}], "[assistant:(a\nc)b]"),
        ([{"role": "assistant", "content": "x"},
          {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
          {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
          {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"}],
         "[assistant:x][assistant:(a)!f!g]"),
    ],
)  # fmt: skip
def test_reasoning_goes_to_what_it_led_to(items: list[dict[str, Any]], prompt: str) -> None:
    head = head_saying("x", THINKS)
    assert ask(head, input=[{"role": "user", "content": "u"}, *items]).status_code == 200
    assert bytes(head.requests[0].token_ids).decode() == f"[user:u]{prompt}<think>\n"


@pytest.mark.parametrize("content", [["a"], 7, True, "a", {"text": "a"}])
def test_bad_reasoning_is_named(content: Any) -> None:
    found = ask(head_saying("x", THINKS), input=[{"type": "reasoning", "content": content}])
    assert found.status_code == 400 and found.json()["error"]["param"] == "input[0].content"


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}]
)
def test_log_probabilities_are_those_of_the_message(fields: dict[str, Any]) -> None:
    def answer(_: Any) -> list[Any]:
        return one_by_one(b"hm</think>\n\nYes", logprobs=True)

    head = ScriptedHead(answer, ToolTokenizer(THINKS))
    with client_of(head) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Hi", **fields}
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        plain = client.responses.create(model="fake", input="Hi")
    assert plain.output[1].content[0].logprobs == []
    for found in (whole, events[-1].response):
        logprobs = found.output[1].content[0].logprobs
        assert [entry.token for entry in logprobs] == ["Y", "e", "s"]
        assert [entry.logprob for entry in logprobs] == [-0.5] * 3
        assert logprobs[0].bytes == [ord("Y")] and logprobs[0].top_logprobs[0].token == "Y"
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [entry.token for e in deltas for entry in e.logprobs] == ["Y", "e", "s"]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == ["Y", "e", "s"]
    wanted = head.requests[0].sampling.logprobs
    assert wanted == fields.get("top_logprobs", 0)


def test_white_space_that_waits_for_a_call_has_log_probabilities_too() -> None:
    said = one_by_one(b"hm</think>\n  Yes", logprobs=True)
    head = ScriptedHead(lambda _: said, ToolTokenizer(THINKS))
    part = ask(head, top_logprobs=0).json()["output"][1]["content"][0]
    assert part["text"] == "  Yes" == "".join(entry["token"] for entry in part["logprobs"])


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(
    "text",
    [f"why</think>a<tool_call>{CALL}</tool_call>b", f"why</think><tool_call>{CALL[:-5]}", ""],
)
def test_each_event_is_one_of_openais(text: str, finish: FinishReason) -> None:
    events_of_openai = TypeAdapter[Any](ResponseStreamEvent)
    head = ScriptedHead(lambda _: spoken(*text, finish=finish), ToolTokenizer(THINKS))
    lines = ask(head, tools=[WEATHER], stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert events_of_openai.validate_python(event).type == event["type"]
