"""Tests `/v1/messages` with Anthropic's client, and the place of each block in a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from scripted_head import ScriptedHead, call, served, spoken
from test_api_tools import CALL, LLAMA_CALL, PLAIN_JSON, TAGGED, ToolTokenizer, head_saying

from moonpool.api.serving_backend import ApiOptions, RequestRefused
from moonpool.types import FinishReason

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
}


def client_of(url: str, key: str = "none") -> Any:
    return pytest.importorskip("anthropic").Anthropic(base_url=url, api_key=key, max_retries=0)


def post(head: ScriptedHead, **fields: Any) -> Any:
    return call(head, "/v1/messages", {"messages": [USER], "max_tokens": 20} | fields)


@pytest.mark.long
def test_anthropics_client_reads_answers_and_streams() -> None:
    head = ScriptedHead(lambda _: spoken("Grüße", " 🎉", cached_tokens=2))
    with served(head) as url, client_of(url) as client:
        answer = client.messages.create(
            model="fake",
            max_tokens=20,
            messages=[USER],
            system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["zzz"],
            extra_body={"temperature": 0.5},
            metadata={"user_id": "u"},
        )
        assert (answer.content[0].text, answer.stop_reason) == ("Grüße 🎉", "end_turn")
        assert answer.usage.cache_read_input_tokens == 2
        assert answer.usage.input_tokens == len(head.requests[0].token_ids) - 2
        assert answer.usage.output_tokens == len("Grüße 🎉".encode())
        with client.messages.stream(model="fake", max_tokens=20, messages=[USER]) as stream:
            assert "".join(stream.text_stream) == "Grüße 🎉"
            assert stream.get_final_message().usage.output_tokens == len("Grüße 🎉".encode())
        counted = client.messages.count_tokens(model="fake", messages=[USER])
        assert counted.input_tokens == len(head.requests[1].token_ids)
        assert client.models.list().data[0].display_name == "fake"
    assert head.requests[0].sampling.max_tokens == 20
    assert head.requests[0].sampling.temperature == 0.5
    assert bytes(head.requests[0].token_ids).startswith(b"Be")


def test_anthropics_client_reads_calls_of_tools() -> None:
    head = head_saying(f"Well.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    with served(head) as url, client_of(url) as client:
        asked = {"model": "fake", "max_tokens": 20, "messages": [USER], "tools": [TOOL]}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (answer, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert message.content[0].text == "Well."
        assert message.content[1].input == {"city": "Oslo"}
        assert message.content[1].id != message.content[2].id


def test_anthropics_client_knows_our_errors() -> None:
    anthropic = pytest.importorskip("anthropic")
    late = ScriptedHead(
        lambda _: [*spoken("a", finish=None), RequestRefused(504, "deadline", "too late")]
    )
    options = ApiOptions(api_keys={"secret": "ann"})
    with served(late, options) as url:
        with client_of(url) as stranger, pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(model="fake", max_tokens=1, messages=[USER])
        with client_of(url, "secret") as client:
            with pytest.raises(anthropic.NotFoundError, match="other"):
                client.messages.create(model="other", max_tokens=1, messages=[USER])
            with pytest.raises(anthropic.APIStatusError, match="too late"):
                client.messages.create(model="fake", max_tokens=1, messages=[USER])
            with pytest.raises(anthropic.APIError, match="too late"):
                list(
                    client.messages.create(model="fake", max_tokens=1, messages=[USER], stream=True)
                )
    assert [request.tenant for request in late.requests] == ["ann", "ann"]


def test_a_conversation_with_results_is_the_chat_of_it() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}]{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    )
    head = ScriptedHead(lambda _: spoken("ok"), ToolTokenizer(template))
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "7"}],
    }
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    conversation = [
        USER,
        {"role": "assistant", "content": [hidden, thought, {"type": "text", "text": "Look"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    post(head, messages=conversation, system="Be", tools=[TOOL], tool_choice={"type": "none"})
    text = bytes(head.requests[0].token_ids).decode()
    called = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert text == f"[system:Be][user:Hi][assistant:Look{called}][tool:7][user:And?]"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto"}, False),
    ],
)
def test_who_must_call_is_held_to_it(choice: dict[str, Any], forced: bool) -> None:
    head = head_saying('{"city": "Oslo"}' if "name" in choice else f"[{LLAMA_CALL}]", PLAIN_JSON)
    answer = post(head, tools=[TOOL], tool_choice=choice).json()
    assert bool(head.requests[0].sampling.grammar) == forced
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][-1]["input"] == {"city": "Oslo"}


def test_a_call_that_is_cut_is_no_block() -> None:
    head = ScriptedHead(
        lambda _: spoken('{"city', finish=FinishReason.LENGTH), ToolTokenizer(PLAIN_JSON)
    )
    answer = post(head, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


def test_a_call_that_a_stop_sequence_cuts_is_no_block() -> None:
    head = head_saying(f"So.<tool_call>{CALL}</tool_call>")
    answer = post(head, tools=[TOOL], stop_sequences=["Os"]).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Os")


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(
    "text", [f"a<tool_call>{CALL}</tool_call>b", f"<tool_call>{CALL[:-5]}", ""]
)
def test_each_event_is_one_of_anthropics(text: str, finish: FinishReason) -> None:
    events_of_anthropic = TypeAdapter[Any](
        pytest.importorskip("anthropic").types.RawMessageStreamEvent
    )
    head = ScriptedHead(lambda _: spoken(*text, finish=finish), ToolTokenizer(TAGGED))
    lines = post(head, tools=[TOOL], stream=True).text.splitlines()
    for line in lines:
        if line.startswith("data: "):
            event = json.loads(line[6:])
            assert events_of_anthropic.validate_python(event).type == event["type"]


def test_a_schema_holds_and_a_stop_sequence_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    head = ScriptedHead(lambda _: spoken('{"a": 1}'))
    post(head, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert head.requests[0].sampling.grammar
    stopped = post(ScriptedHead(lambda _: spoken("one END two")), stop_sequences=["END"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert stopped["content"] == [{"type": "text", "text": "one "}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "'max_tokens': 0. It must be between 1"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "'messages[0].role' must be 'user', 'assistant' or 'system'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "only text"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"nonsense": 1}, "nonsense"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ],
)
def test_bad_input_is_named_in_their_format(fields: dict[str, Any], words: str) -> None:
    response = post(ScriptedHead(), **fields)
    error = response.json()
    assert response.status_code == 400
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_events_come_in_their_order() -> None:
    head = head_saying(f"<tool_call>{CALL}</tool_call>", TAGGED)
    response = post(head, stream=True, tools=[TOOL])
    kinds = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    once = [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]]
    assert once == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert [json.loads(line)["type"] for line in lines] == kinds


THINKS = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}]{% endfor %}"
    "<think>\n{# </think> #}"
)


def test_thinking_is_a_block_of_its_own_and_may_be_sent_back() -> None:
    head = head_saying(f"why\n</think>\n\nWell.<tool_call>{CALL}</tool_call>", THINKS)
    with served(head) as url, client_of(url) as client:
        asked = {"model": "fake", "max_tokens": 90, "messages": [USER], "tools": [TOOL]}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (answer, streamed):
            thinking, text, use = message.content
            assert (thinking.type, thinking.thinking) == ("thinking", "why\n")
            assert thinking.signature and thinking.signature == answer.content[0].signature
            assert text.text == "Well." and use.input == {"city": "Oslo"}
            assert message.usage.output_tokens_details.thinking_tokens == len("why\n")
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        for block in content:
            block.pop("caller", None)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns = [USER, {"role": "assistant", "content": content}]
        turns.append({"role": "user", "content": [result]})
        client.messages.create(**(asked | {"messages": turns}))
        counted = client.messages.count_tokens(model="fake", messages=turns, tools=[TOOL])
    said = "[user:Hi][assistant:(why\n)Well.!weather][tool:sunny]"
    assert bytes(head.requests[-1].token_ids).decode() == f"<tool_call>{said}<think>\n"
    assert counted.input_tokens == len(head.requests[-1].token_ids)


def test_events_of_thinking_come_in_their_order() -> None:
    response = post(head_saying("hm</think>So.", THINKS), stream=True)
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    kinds = [e["delta"]["type"] if "delta" in e else e["type"] for e in events[1:-2]]
    assert kinds == [
        *("content_block_start", "thinking_delta", "thinking_delta"),
        *("signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "text_delta", "text_delta", "content_block_stop"),
    ]
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_thinking_that_a_limit_cuts_is_thinking() -> None:
    head = ScriptedHead(lambda _: spoken("hm", finish=FinishReason.LENGTH), ToolTokenizer(THINKS))
    answer = post(head).json()
    assert [block["type"] for block in answer["content"]] == ["thinking"]
    assert answer["stop_reason"] == "max_tokens"


def test_thinking_without_text_is_named() -> None:
    turns = [USER, {"role": "assistant", "content": [{"type": "thinking"}]}]
    response = post(ScriptedHead(), messages=turns)
    assert response.status_code == 400
    assert "messages[1].content[0]" in response.json()["error"]["message"]
