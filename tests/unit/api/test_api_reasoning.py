"""Tests that the parser separates reasoning from the answer, however the text is cut into pieces,
and loses no part of either."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_head import ScriptedHead, call, chat, complete, events_of, served, spoken

from moonpool.api.output_text.model_output import ModelOutput
from moonpool.api.serving_backend import ApiOptions, Output
from moonpool.text.grammar import matches_grammar
from moonpool.text.tokenizer import ByteTextStream
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.text.tokenizers.chat_template import ChatTemplate
from moonpool.types import FinishReason, Token

KNOWS = "{{ messages[0].content }}{# <think></think> #}"
BEGINS = "{{ messages[0].content }}<think>\n{# </think> #}"
PLAIN = "{{ messages[0].content }}"
CALL = '<tool_call>{"name": "clock"}</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}


class ThinkingTokenizer(ByteTokenizer):
    """Returns the tokenizer of a model with this template."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.tool_template = template
        self._chat = ChatTemplate(template)


def head_saying(text: str, template: str = KNOWS) -> ScriptedHead:
    return ScriptedHead(lambda _: spoken(*text), ThinkingTokenizer(template))


TEXTS = [
    (False, "<think>\nso\n</think>\n\nYes.", "so\n", "Yes."),
    (False, "\n <think>a < b</think>c", "a < b", "c"),
    (False, "Yes, <think>no</think>.", "", "Yes, <think>no</think>."),
    (False, "\n\nYes.", "", "\n\nYes."),
    (False, "<thin", "", "<thin"),
    (False, "<think>", "", ""),
    (False, "<think>never ends </thin", "never ends </thin", ""),
    (True, "\nso</think>Yes.", "so", "Yes."),
    (True, "so</think></think>", "so", "</think>"),
    (True, "", "", ""),
    (False, "", "", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "answer"), TEXTS)
@given(data=st.data())
def test_any_pieces_are_divided_alike(
    inside: bool, text: str, reasoning: str, answer: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    prompt = list(b"<think>\n") if inside else []
    reader, _ = ModelOutput(ThinkingTokenizer(KNOWS)).reader(prompt, True, None, lambda: "")
    assert reader is not None
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.push(text[begin:end])
    found += reader.flush(cut=False)
    assert "".join(said.reasoning for said in found) == reasoning
    assert "".join(said.text for said in found) == answer


@pytest.mark.parametrize(
    ("template", "text"),
    [(KNOWS, "<think>why</think>Because."), (BEGINS, "why</think>Because.")],
)
def test_an_answer_and_a_stream_have_it_apart(template: str, text: str) -> None:
    message = chat(head_saying(text, template)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "Because.")
    assert message["reasoning"] == "why"
    deltas = [
        event["choices"][0]["delta"]
        for event in events_of(chat(head_saying(text, template), stream=True))
        if event["choices"]
    ]
    joined = {
        key: "".join(delta.get(key) or "" for delta in deltas)
        for key in ("reasoning_content", "content")
    }
    assert joined == {"reasoning_content": "why", "content": "Because."}


def message_of(head: ScriptedHead, **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = chat(head, **fields).json()["choices"][0]["message"]
    return message


def test_what_has_no_place_for_it_stays_text() -> None:
    text = "<think>why</think>Because."
    assert message_of(head_saying(text, PLAIN))["content"] == text
    assert complete(head_saying(text)).json()["choices"][0]["text"] == text


def grammar_of(head: ScriptedHead, **fields: Any) -> str:
    message_of(head, **fields)
    grammar: str = head.requests[-1].sampling.grammar
    return grammar


@pytest.mark.parametrize(
    ("template", "text", "others"),
    [
        (BEGINS, "hm\n</think>\n\n7", ["7", "hm</think>x"]),
        (KNOWS, "<think>hm</think>7", ["hm</think>7", "<think>7"]),
        (KNOWS, "7", ["x"]),
        ("{{ messages[0].content }}<think>\n\n</think>\n\n", "7", ["<think>hm</think>7"]),
        (PLAIN, "7", ["hm</think>7"]),
    ],
)
def test_a_grammar_holds_what_comes_behind_the_reasoning(
    template: str, text: str, others: list[str]
) -> None:
    form = {"structured_outputs": {"regex": "[0-9]+"}}
    head = head_saying(text, template)
    message = message_of(head, **form)
    assert message["content"] == "7"
    assert message.get("reasoning", "").strip() == ("hm" if "hm" in text else "")
    grammar = head.requests[0].sampling.grammar
    assert matches_grammar(grammar, text)
    for other in others:
        assert not matches_grammar(grammar, other)


def test_an_answer_behind_reasoning_that_breaks_its_grammar_is_an_error() -> None:
    head = head_saying("hm</think>x", BEGINS)
    response = chat(head, structured_outputs={"regex": "[0-9]+"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "form_lost"


def test_a_required_call_comes_behind_reasoning() -> None:
    text = 'hm</think>\n\n[{"name": "clock", "parameters": {}}]'
    message = message_of(head_saying(text, BEGINS), tools=[CLOCK], tool_choice="required")
    assert (message["reasoning"], message["content"]) == ("hm", None)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]


@pytest.mark.parametrize("text", ['hm</think>\n{"a": 1}', '{"a": 1}'])
def test_in_front_of_vllm_the_server_decides_whether_there_is_reasoning(text: str) -> None:
    head = head_saying(text, BEGINS)
    head.card = msgspec.structs.replace(head.card, grammar_waits=False)
    message = message_of(head, response_format={"type": "json_object"})
    assert json.loads(message["content"]) == {"a": 1}
    assert message.get("reasoning") == ("hm" if "hm" in text else None)
    assert not matches_grammar(head.requests[0].sampling.grammar, f"hm</think>{text}")


def test_gpt_oss_behind_vllm_may_reason_before_its_json() -> None:
    """The grammar must apply to the last message only."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    )
    head = head_saying(text, "{{ messages[0].content }}{# <|channel|>analysis #}")
    head.card = msgspec.structs.replace(head.card, grammar_waits=False)
    message = message_of(head, response_format={"type": "json_object"})
    assert (message["reasoning"], message["content"]) == ("hm", '{"a": 1}')


def test_a_reasoning_that_is_a_special_token_is_told_all_the_same() -> None:
    class Tokenizer(ThinkingTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            marks = {300: b"<think>", 301: b"</think>"}
            return marks.get(token_id) or super().token_bytes(token_id)

        def stream(self, skip_special_tokens: bool = True, shown: Any = None) -> ByteTextStream:
            skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
            return ByteTextStream(self.token_bytes, skipped, shown)

    tokenizer = Tokenizer(KNOWS)
    tokenizer.vocab_size = 400
    tokenizer.special_token_ids |= {300, 301}
    said = [300, *b"hm </think>", 301, *b"7"]
    output = Output(tuple(Token(token_id=i) for i in said), FinishReason.STOP)
    head = ScriptedHead(lambda _: [output], tokenizer)
    found = chat(head).json()
    message = found["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm </think>", "7")
    assert "<[301]>" in grammar_of(head, structured_outputs={"regex": "[0-9]"})


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "count"),
    [
        (KNOWS, "<think>why</think>Because.", 3),
        (BEGINS, "Grüße\n</think>\n\nYes", 8),
        (BEGINS, "a < b</", 7),
        (KNOWS, "Because.", 0),
        (KNOWS, "<think></think>x", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(
    template: str, text: str, count: int, one_by_one: bool
) -> None:
    """Each token is a byte. Tokens of the tags must not be counted."""
    parts = spoken(*text) if one_by_one else spoken(text)
    head = ScriptedHead(lambda _: parts, ThinkingTokenizer(template))
    response = call(head, "/v1/responses", {"model": "fake", "input": "Hi"})
    details = response.json()["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": count}


def test_a_client_may_leave_it_out() -> None:
    message = message_of(head_saying("<think>why</think>Because."), include_reasoning=False)
    assert "reasoning_content" not in message
    assert message["content"] == "Because."


def test_calls_are_found_behind_it_only() -> None:
    template = "{% if tools %}<tool_call>{% endif %}" + KNOWS
    message = message_of(head_saying(f"<think>{CALL}</think>{CALL}", template), tools=[CLOCK])
    assert message["reasoning_content"] == CALL
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_a_server_may_leave_it_as_text() -> None:
    text = "<think>why</think>Because."
    with served(head_saying(text), ApiOptions(reasoning_parser="none")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "?"}]
        )
    assert answer.choices[0].message.content == text
    assert "reasoning" not in json.loads(answer.to_json())["choices"][0]["message"]


def test_a_client_with_all_tokens_gets_the_end_of_its_stream_only() -> None:
    """If a limit ends an answer within its reasoning, the last increment has the reasoning that was
    held back."""
    text = "<think>so it is </"
    whole = chat(head_saying(text), stream=True, return_token_ids=True)
    tokens = [
        token
        for event in events_of(whole)
        for choice in event["choices"]
        for token in choice.get("token_ids") or ()
    ]
    rest = call(
        head_saying(text),
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0},
        headers={"X-Resume-Tokens": str(len(tokens)), "X-Request-Id": "r"},
    )
    assert rest.status_code == 200
    deltas = [event["choices"][0]["delta"] for event in events_of(rest) if event["choices"]]
    assert not any("reasoning" in delta or delta.get("content") for delta in deltas)


def prompt_of(template: str, messages: list[dict[str, Any]]) -> str:
    head = head_saying("x", "{% set tools = 1 %}" + template)
    assert chat(head, messages=messages).status_code == 200
    return bytes(head.requests[0].token_ids).decode()


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_that_comes_back_is_told_to_the_template(sent: str, read: str) -> None:
    answer = {"role": "assistant", "content": "a", sent: "hm"}
    messages = [{"role": "user", "content": "u", "reasoning": "no"}, answer]
    template = f"{{% for m in messages %}}[{{{{ m.{read} }}}}]{{% endfor %}}"
    assert prompt_of(template, messages)[-4:] == "[hm]"
    bad = chat(head_saying("x"), messages=[{"role": "assistant", "content": "a", sent: 7}])
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "messages[0].reasoning_content"


def test_gpt_oss_gets_thinking_only_where_its_template_takes_it() -> None:
    """A message with text, calls and thinking must be refused."""
    made = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    answer = {"role": "assistant", "tool_calls": [made], "reasoning": "hm"}
    template = "x{{ messages[0].thinking }}"
    assert prompt_of(template, [answer | {"content": None}]) == "xhm"
    assert prompt_of(template, [answer | {"content": "a"}]) == "x"


@pytest.mark.parametrize(
    "written",
    ["{{ 'x' + f.arguments + 'y' }}", "x{{ f.arguments }}y", "x{{ f.arguments | tojson }}y",
     "{{ 'x' ~ f.arguments ~ 'y' }}"],
)  # fmt: skip
def test_arguments_are_json_to_a_template_that_joins_them_with_text(written: str) -> None:
    function = {"name": "clock", "arguments": '{"a": "\u00fc", "b": [true]}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    template = "{% set f = messages[0].tool_calls[0].function %}" + written
    text = prompt_of(template, [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert text == 'x{"a": "ü", "b": [true]}y'


@pytest.mark.parametrize(("effort", "thinks"), [("high", "True"), ("none", "False")])
def test_each_api_tells_the_template_how_much_to_reason(effort: str, thinks: str) -> None:
    """As vLLM does: some templates read the effort, and others only whether to think."""
    said = {"messages": [{"role": "user", "content": "u"}]}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**said, "reasoning_effort": effort},
        "/v1/responses": {"input": "u", "reasoning": {"effort": effort, "summary": "auto"}},
        "/v1/messages": {**said, "max_tokens": 9, "output_config": {"effort": effort}},
    }
    for path, fields in asked.items():
        head = head_saying("x", "{% set tools = 1 %}{{ reasoning_effort }} {{ enable_thinking }}")
        answer = call(head, path, {"model": "fake"} | fields)
        assert answer.status_code == 200, path
        assert bytes(head.requests[0].token_ids).decode() == f"{effort} {thinks}", path
        if path == "/v1/responses":
            assert answer.json()["reasoning"]["effort"] == effort
    own = {"reasoning_effort": effort, "chat_template_kwargs": {"enable_thinking": "own"}}
    head = head_saying("x", "{% set tools = 1 %}{{ enable_thinking }}")
    assert call(head, "/v1/chat/completions", {**said, **own}).status_code == 200
    assert bytes(head.requests[0].token_ids).decode() == "own"
