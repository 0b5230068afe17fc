"""Tests that the parser finds calls of tools in the model's output, however it is cut into pieces,
that other text stays text, and that a model that must call a tool can only write a call."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_head import ScriptedHead, chat, events_of, served, spoken

from moonpool.api.bodies import ChatBody
from moonpool.api.errors import ApiError
from moonpool.api.output_text.model_output import ModelOutput
from moonpool.api.tools import Tools, together
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.text.tokenizers.chat_template import ChatTemplate
from moonpool.types import FinishReason

TAGGED = "{% if tools %}Say <tool_call>{}</tool_call>. {% endif %}{{ messages[0].content }}"
PLAIN_JSON = "{% if tools %}Answer with JSON. {% endif %}{{ messages[0].content }}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Oslo"}}'


class ToolTokenizer(ByteTokenizer):
    """Returns the tokenizer of a model that was taught tools by this template."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.tool_template = template
        self._chat = ChatTemplate(template)


def head_saying(text: str, template: str = TAGGED) -> ScriptedHead:
    return ScriptedHead(lambda _: spoken(*text), ToolTokenizer(template))


def read(
    template: str, *texts: str, cut: bool = False, **fields: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text and the calls of an answer that comes in these pieces."""
    body = msgspec.convert({"messages": [], "tools": TOOLS} | fields, ChatBody)
    model = ModelOutput(ToolTokenizer(template))
    reader, _ = model.reader([], True, Tools(body).rules(), lambda: "1")
    assert reader is not None
    found = [said for text in texts for said in reader.push(text)] + reader.flush(cut)
    calls = [call for said in found for call in said.calls]
    return "".join(said.text for said in found), together(calls)


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


TEXTS = [
    ("hello", "hello", []),
    ("a < b <tool", "a < b <tool", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
    (f"Well.\n<tool_call>{CALL}</tool_call>\n<tool_call>{{\"name\": \"clock\"}}</tool_call>",
     "Well.\n", ["weather", "clock"]),
    (f"<tool_call>{CALL}</tool_call>\n\nSo.\n", "So.\n", ["weather"]),
    (f"<tool_call>{CALL}", "", ["weather"]),
    ("<tool_call>{no json}</tool_call> x", "<tool_call>{no json}</tool_call> x", []),
    ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
    ("<tool_call>{", "<tool_call>{", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "called"), TEXTS)
@given(data=st.data())
def test_tagged_calls_are_found_however_they_are_cut(
    text: str, said: str, called: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got_said, calls = read(TAGGED, *parts)
    assert (got_said, [name for name, _ in functions(calls)]) == (said, called)
    if "weather" in called:
        assert functions(calls)[0][1] == {"city": "Oslo"}


EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "all": {"type": "boolean"},
                "tags": {"type": "array"},
                "note": {"type": ["string", "null"]},
                "most": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "odd": {"type": [{"no": "type"}, "object"], "anyOf": [7]},
            },
        },
    },
}
QWEN_EDIT = """
<function=edit>
<parameter=path>
a "b" <c>
  d
</parameter>
<parameter=line>
12
</parameter>
<parameter=all>
True
</parameter>
<parameter=tags>
["x", 1]
</parameter>
<parameter=note>
null
</parameter>
<parameter=other>
7
</parameter>
<parameter=most>
5
</parameter>
<parameter=odd>
{}
</parameter>
</function>
"""
GLM_EDIT = (
    'edit\n<arg_key>path</arg_key>\n<arg_value>a "b" <c>\n  d</arg_value>\n'
    "<arg_key>line</arg_key><arg_value>12</arg_value>\n<arg_key>all</arg_key>\n"
    '<arg_value>true</arg_value>\n<arg_key>tags</arg_key><arg_value>["x", 1]</arg_value>\n'
    "<arg_key>note</arg_key><arg_value>null</arg_value>\n"
    "<arg_key>other</arg_key><arg_value>7</arg_value>\n"
    "<arg_key>most</arg_key><arg_value>5</arg_value>\n<arg_key>odd</arg_key><arg_value>{}</arg_value>"
)
EDITED = {
    "path": 'a "b" <c>\n  d', "line": 12, "all": True, "tags": ["x", 1], "note": None,
    "other": "7", "most": 5, "odd": {},
}  # fmt: skip


@pytest.mark.parametrize("call", [QWEN_EDIT, GLM_EDIT], ids=["qwen", "glm"])
@given(cuts=st.lists(st.integers(0, 400), max_size=4).map(sorted))
def test_tagged_arguments_have_the_types_of_the_schema(call: str, cuts: list[int]) -> None:
    text = f"Well.\n<tool_call>{call}</tool_call>"
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, calls = read(TAGGED, *parts, tools=[EDIT])
    assert said == "Well.\n"
    assert functions(calls) == [("edit", EDITED)]


@pytest.mark.parametrize("call", [QWEN_EDIT, GLM_EDIT], ids=["qwen", "glm"])
def test_a_call_that_a_limit_cuts_comes_as_far_as_it_came_and_never_as_text(call: str) -> None:
    """The part of the call that was written is returned as a call with incomplete JSON."""
    text = f"So.\n<tool_call>{call}".rstrip()
    whole = json.dumps(EDITED)
    lengths = set[int]()
    for length in range(text.index("<tool_call>") + 11, len(text)):
        said, calls = read(TAGGED, text[:length], cut=True, tools=[EDIT, CLOCK])
        assert said == "So.\n"
        for found in calls:
            arguments = found["function"]["arguments"]
            assert whole.startswith(arguments) and found["function"]["name"] == "edit"
            lengths.add(len(arguments))
    assert len(lengths) > 15
    assert functions(read(TAGGED, text, tools=[EDIT])[1]) == [("edit", EDITED)]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("clock", {}),
        ("<function=clock>\n</function>", {}),
        ("<function=edit><parameter=path>x", {"path": "x"}),
        ("<function=edit><parameter=line>many</parameter></function>", {"line": "many"}),
        ("<function=edit>words<parameter=path>x</parameter></function>", None),
        ("<function=other></function>", None),
        ("edit<arg_key>path</arg_key>words<arg_value>x</arg_value>", None),
        ("edit<arg_key>path", None),
        ("what", None),
        ("<function=>", None),
    ],
)
def test_tagged_text_that_is_no_call_stays_text(
    inside: str, arguments: dict[str, Any] | None
) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    said, calls = read(TAGGED, text, tools=[EDIT, CLOCK])
    if arguments is None:
        assert (said, calls) == (text, [])
    else:
        assert [found for _, found in functions(calls)] == [arguments]


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (LLAMA_CALL, ["weather"]),
        (f" [{CALL}, {LLAMA_CALL}]", ["weather", "weather"]),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', ["weather"]),
        ('{"answer": 42}', []),
        ("[1, 2]", []),
        ('{"name": ["weather"], "parameters": {}}', []),
        ("{", []),
        ("[]", []),
        ("It is 42.", []),
        ("", []),
    ],
)
@given(cut=st.integers(0, 60))
def test_an_answer_that_is_json_is_a_call_if_it_names_a_tool(
    text: str, called: list[str], cut: int
) -> None:
    said, calls = read(PLAIN_JSON, text[:cut], text[cut:])
    assert [name for name, _ in functions(calls)] == called
    assert said == ("" if called else text)


def test_one_call_at_a_time_where_that_is_asked() -> None:
    two = f"<tool_call>{CALL}</tool_call>" * 2
    assert len(read(TAGGED, two)[1]) == 2
    assert len(read(TAGGED, two, parallel_tool_calls=False)[1]) == 1
    assert len(read(TAGGED, two * 20)[1]) == 40, "no call is lost"


def test_calls_in_an_answer_and_in_a_stream() -> None:
    text = f"Let me see.\n<tool_call>{CALL}</tool_call>"
    body = chat(head_saying(text), tools=TOOLS).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see.\n"
    assert functions(message["tool_calls"]) == [("weather", {"city": "Oslo"})]
    with served(head_saying(text)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "?"}]
        stream = client.chat.completions.create(
            model="fake", messages=messages, tools=TOOLS, stream=True
        )
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see.\n"
    first, *more = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert first.index == 0 and first.id and first.function.name == "weather"
    assert len(more) > 10, "arguments come as the model writes them"
    assert all((call.index, call.id, call.function.name) == (0, None, None) for call in more)
    arguments = "".join(call.function.arguments for call in [first, *more])
    assert json.loads(arguments) == {"city": "Oslo"}
    assert chunks[-1].finish_reason == "tool_calls"


def test_without_a_call_and_without_tools_nothing_changes() -> None:
    for text, fields in (("hello", {"tools": TOOLS}), (CALL, {}), (CALL, {"tool_choice": "none"})):
        (choice,) = chat(head_saying(text), **fields).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_who_must_call_is_held_to_it() -> None:
    head = head_saying(f"[{LLAMA_CALL}]")
    (choice,) = chat(head, tools=TOOLS, tool_choice="required").json()["choices"]
    assert functions(choice["message"]["tool_calls"]) == [("weather", {"city": "Oslo"})]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert head.requests[0].sampling.grammar

    head = head_saying('{"city": "Rome"}')
    named = {"type": "function", "function": {"name": "weather"}}
    with served(head) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "?"}]
        stream = client.chat.completions.create(
            model="fake", messages=messages, tools=TOOLS, tool_choice=named, stream=True
        )
        calls = [c for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
    assert len(calls) > 3 and calls[0].function.name == "weather"
    assert json.loads("".join(c.function.arguments for c in calls)) == {"city": "Rome"}
    assert "Rome" in head.requests[0].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_meant_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        Tools(msgspec.convert({"messages": []} | fields, ChatBody))
    assert caught.value.param == param
    response = chat(head_saying("x"), **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_call_that_is_required_is_the_whole_answer_whatever_its_form() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    response = chat(head_saying(f"[{LLAMA_CALL}]"), **fields)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_required_needs_no_template_that_knows_tools() -> None:
    ignorant = "{{ messages[0].content }}"
    response = chat(head_saying(f"[{LLAMA_CALL}]", ignorant), tools=TOOLS, tool_choice="required")
    assert response.json()["choices"][0]["message"]["tool_calls"]
    refused = chat(head_saying("x", ignorant), tools=TOOLS)
    assert "--chat-template" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "closed"),
    [
        ({}, True),
        ({"required": ["city"]}, True),
        ({"required": ["country"]}, False),  # otherwise, no call would be possible
        ({"additionalProperties": True}, False),
        ({"allOf": [{"properties": {"country": {"type": "string"}}}]}, False),
        ({"properties": {}}, False),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call_adds_no_parameters_to_those_that_are_named(
    more: dict[str, Any], closed: bool, named: bool
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}} | more
    function = {"name": "weather", "parameters": parameters}
    choice = {"type": "function", "function": {"name": "weather"}} if named else "required"
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    schema = Tools(msgspec.convert({"messages": []} | fields, ChatBody)).schema()
    own = schema if named else schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert own == parameters | ({"additionalProperties": False} if closed else {})


CUT_TAILS = [
    (',\n {"name": "cl', []),
    (', {"name": "weather", "parameters": {"ci', ['{"ci']),
    (",", []),
    (', {"name": "clock", "parameters"', []),
]


@pytest.mark.parametrize(("tail", "begun"), CUT_TAILS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_list_of_required_calls_is_never_text(
    tail: str, begun: list[str], stream: bool
) -> None:
    said = f"[{LLAMA_CALL}, {LLAMA_CALL}{tail}"
    head = ScriptedHead(
        lambda _: spoken(*said, finish=FinishReason.LENGTH), ToolTokenizer(PLAIN_JSON)
    )
    response = chat(head, tools=TOOLS, tool_choice="required", stream=stream)
    if stream:
        chunks = [event["choices"][0] for event in events_of(response)]
        assert not any(chunk["delta"].get("content") for chunk in chunks)
        deltas = [call for c in chunks for call in c["delta"].get("tool_calls", ())]
        names = [d["function"]["name"] for d in deltas if "name" in d["function"]]
        assert names == ["weather"] * (2 + len(begun))
        assert len(deltas) > 20, "arguments come as the model writes them"
        assert chunks[-1]["finish_reason"] == "length"
        return
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    found = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert found == ['{"city": "Oslo"}', '{"city": "Oslo"}', *begun]


@pytest.mark.parametrize("size", range(1, len(LLAMA_CALL) + 2))
def test_a_required_call_that_is_cut_anywhere_is_a_begun_call_or_none(size: int) -> None:
    head = ScriptedHead(
        lambda _: spoken(*f"[{LLAMA_CALL}"[:size], finish=FinishReason.LENGTH),
        ToolTokenizer(PLAIN_JSON),
    )
    [choice] = chat(head, tools=TOOLS, tool_choice="required").json()["choices"]
    message = choice["message"]
    assert not message["content"] and choice["finish_reason"] == "length"
    for call in message.get("tool_calls", ()):
        assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])


def test_a_cut_text_without_a_whole_call_stays_text() -> None:
    head = ScriptedHead(
        lambda _: spoken('[{"name', finish=FinishReason.LENGTH), ToolTokenizer(PLAIN_JSON)
    )
    assert chat(head, tools=TOOLS).json()["choices"][0]["message"]["content"] == '[{"name'


@pytest.mark.parametrize(
    ("stop", "word", "arguments"),
    [
        ('"Os', "stop", '{"city": '),
        ("</tool_call>", "tool_calls", '{"city": "Oslo"}'),
        ("So", "tool_calls", '{"city": "Oslo"}'),
    ],
)
def test_a_call_that_a_stop_string_cuts_ends_no_turn(stop: str, word: str, arguments: str) -> None:
    head = head_saying(f"<tool_call>{CALL}</tool_call>So.")
    [choice] = chat(head, tools=TOOLS, stop=[stop]).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (word, stop)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
