"""Tests the values of arguments of calls: the marks of their own format, values of any kind, or
none. Also tests long outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import MARKS, WRITERS, Calls, MarkTokenizer

from moonpool.api.output_text.formats import AUTO, call_format
from moonpool.api.output_text.model_output import CallRules, ModelOutput
from moonpool.api.output_text.said import Said
from moonpool.api.output_text.source import OutputReader, TextSource
from moonpool.api.tools import together

TEXT_FUNCTION = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
FUNCTIONS: dict[str, Any] = {"f": TEXT_FUNCTION, "clock": {}}


def read(
    template: str,
    text: str,
    functions: dict[str, Any],
    marks: list[str] | None = None,
    prompt: str = "",
    cut: bool = False,
    **rules: Any,
) -> tuple[str, str, Calls]:
    """Returns text, reasoning and calls of an output that comes token by token."""
    tokenizer = MarkTokenizer(f"tools {template}", marks or [])
    ids = iter(range(100, 1000))
    reader, shown = ModelOutput(tokenizer).reader(
        tokenizer.encode(prompt), True, CallRules(functions, **rules), lambda: str(next(ids))
    )
    assert reader is not None
    stream = tokenizer.stream(True, shown)
    said: list[Said] = []
    for token_id in tokenizer.encode(text):
        said += reader.push(stream.push(token_id))
    said += reader.push(stream.flush()) + reader.flush(cut)
    found = [call["function"] for call in together([call for part in said for call in part.calls])]
    calls = [(function["name"], json.loads(function["arguments"])) for function in found]
    return "".join(s.text for s in said), "".join(s.reasoning for s in said), calls


own_marks = [
    *MARKS,
    *("</parameter>", "</function>", "<function=f>", "<parameter=no>", "</arg_value>", "<arg_key>"),
    *(
        "</invoke>",
        '<invoke name="f">',
        '<parameter name="no">',
        '"}',
        "'",
        '"',
        "\\",
        "{",
        "]",
        ")",
    ),
]
"""Returns the marks of a format, each followed by a letter, so that the parser can only mean the
tags around it."""
values = st.lists(
    st.builds("{}{}x".format, st.text("a \n", max_size=3), st.sampled_from(own_marks)), max_size=4
).map("".join)


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "harmony"])
@given(first=values, second=values)
@settings(max_examples=25)
def test_values_may_hold_marks(writer: str, are_tokens: bool, first: str, second: str) -> None:
    calls: Calls = [("f", {"a": first, "b": second}), ("f", {"b": second})]
    mark, write = WRITERS[writer]
    form = call_format(AUTO, mark)
    assert form is not None
    marks = [m for m in form.marks if m in MARKS] if are_tokens else []
    assert read(mark, write(calls), FUNCTIONS, marks) == ("", "", calls)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("<parameter=a>\nx\n</tool_call>\n", {"a": "x\n</tool_call>"}),
        ("<parameter=a>\nx<parameter=b>\ny\n</parameter>\n", {"a": "x", "b": "y"}),
        ("<parameter=a>\nx<parameter=c>y\n</parameter>\n", {"a": "x<parameter=c>y"}),
        ("<parameter=a>\nx<parameter=a>y\n</parameter>\n", {"a": "x<parameter=a>y"}),
        ("<parameter=a>\nx</parameter> y\n</parameter>\n", {"a": "x</parameter> y"}),
    ],
)
def test_a_tag_is_one_if_what_follows_it_says_so(inside: str, arguments: dict[str, str]) -> None:
    text = f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"
    assert read("<tool_call>", text, FUNCTIONS) == ("", "", [("f", arguments)])


def test_a_missing_tag_at_the_end_is_as_if_it_were_there() -> None:
    for end in (
        "</parameter></function>",
        "</function></tool_call>",
        "</parameter></tool_call>",
        "",
    ):
        text = f"<tool_call><function=f><parameter=a>x{end}"
        assert read("<tool_call>", text, FUNCTIONS) == ("", "", [("f", {"a": "x"})])


def test_a_broken_tag_at_the_end_is_a_part_of_the_value() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</func\n</tool_call>"
    value = "x\n</parameter>\n</func"
    assert read("<tool_call>", text, FUNCTIONS) == ("", "", [("f", {"a": value})])


DEFINED = {"$defs": {"Size": {"enum": [1, 2]}, "Point": {"properties": {}, "type": "object"}}}
KINDS: list[tuple[Any, str, Any]] = [
    ({"type": "integer"}, "007", 7),
    ({"type": "integer"}, "+5", 5),
    ({"type": "integer"}, "many", "many"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "number"}, "1e3", 1000),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "TRUE", True),
    ({"type": "boolean"}, "0", False),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "array"]}, '["x"]', ["x"]),
    ({"type": ["string", "array"]}, '{"x": 1}', '{"x": 1}'),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": "string"}, "null", "null"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, None]}, "1", 1),
    ({"const": 3}, "3", 3),
    ({"$ref": "#/$defs/Size"}, "2", 2),
    ({"$ref": "#/$defs/Point"}, "{'x': 1}", {"x": 1}),
    ({"allOf": [{"$ref": "#/$defs/Size"}]}, "2", 2),
    ({"$ref": "#/$defs/none"}, "2", "2"),
    ({"$ref": "#"}, "{}", {}),
    ({"type": "array"}, "[1e999]", "[1e999]"),
    ({}, '{"a": 1}', {"a": 1}),
    ({}, "7", "7"),
    (7, "7", "7"),
]


@pytest.mark.parametrize(("schema", "text", "value"), KINDS)
def test_the_schema_tells_what_a_value_means(schema: Any, text: str, value: Any) -> None:
    functions = {"f": {"type": "object", "properties": {"a": schema}, **DEFINED}}
    call = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert read("<tool_call>", call, functions) == ("", "", [("f", {"a": value})])


@pytest.mark.parametrize(
    ("schema", "is_text", "text", "value"),
    [
        ({}, "true", "3", "3"),
        ({}, "false", "3", 3),
        ({}, "false", '"q"', "q"),
        ({"type": "integer"}, "true", "3", 3),
        ({"type": "string"}, "false", "3", "3"),
        ({"type": "string"}, "false", '"q"', "q"),
        ({"type": "string"}, "true", '"q"', '"q"'),
    ],
)
def test_the_schema_comes_before_deepseeks_attribute(
    schema: Any, is_text: str, text: str, value: Any
) -> None:
    functions = {"f": {"properties": {"a": schema}}}
    call = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" '
        f'string="{is_text}">{text}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    assert read("｜DSML｜", call, functions) == ("", "", [("f", {"a": value})])


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions."


@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize(
    "text",
    [
        f"{DEEPSEEK}function<｜tool▁sep｜>clock\n```json\n\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"{DEEPSEEK}clock<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"{KIMI}clock:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        "[TOOL_CALLS]clock",
        "[TOOL_CALLS]clock[ARGS]",
        "[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]",
        '<tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": null}</tool_call>',
        "<tool_call>clock</tool_call>",
    ],
)
def test_a_call_may_have_no_arguments(text: str, marks: list[str]) -> None:
    mark = next(m for m in ("<tool_call>", *MARKS) if text.startswith(m))
    assert read(mark, text, FUNCTIONS, marks) == ("", "", [("clock", {})])
    assert read(mark, f"{text}\n{text}", FUNCTIONS, marks)[2] == [("clock", {})] * 2
    assert read(mark, text.replace("clock", "other"), FUNCTIONS, marks)[2] == []


PYTHON: list[tuple[str, Any]] = [
    ("'''it's \"so\"'''", 'it\'s "so"'),
    ("'' 'y'", "y"),
    ("'x''y'", "xy"),
    ("''", ""),
    ('"""\na\n"""', "\na\n"),
    ("{1: 2, None: 'x'}", {"1": 2, "null": "x"}),
    ("r'\\d'", "\\d"),
    ("[(1, 2), {}]", [[1, 2], {}]),
]


@pytest.mark.parametrize(("written", "value"), PYTHON)
def test_values_of_python(written: str, value: Any) -> None:
    text = f"[f(a={written}, b=')'), clock( )]"
    assert read("", text, FUNCTIONS)[2] == [("f", {"a": value, "b": ")"}), ("clock", {})]


@pytest.mark.parametrize("written", ["1e999", "b'x'", "{(1,): 2}", "1 + 2", "'"])
def test_what_json_cannot_say_is_no_call(written: str) -> None:
    text = f"[f(a={written})]"
    assert read("", text, FUNCTIONS) == (text, "", [])


CALL = '<tool_call>\n{"name": "clock"}\n</tool_call>'


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_ends_the_reasoning_where_its_mark_is_a_token(cut: bool) -> None:
    template = "<tool_call> <think> </think>"
    tokens = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    called = ("", "hm\n", [("clock", {})])
    assert read(template, f"hm\n{CALL}", FUNCTIONS, tokens, "<think>", cut) == called
    assert read(template, f"hm\n{CALL}", FUNCTIONS, [], "<think>") == ("", f"hm\n{CALL}", [])
    said = f"a <tool_call> b</think>\n\n{CALL}"
    assert read(template, said, FUNCTIONS, tokens, "<think>") == ("", "a  b", [("clock", {})])


def ids_of(*ids: str) -> list[str]:
    calls = "".join(
        f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for i in ids
    )
    tokenizer = MarkTokenizer("tools <|tool_calls_section_begin|>", [])
    reader, _ = ModelOutput(tokenizer).reader([], True, CallRules(FUNCTIONS), lambda: "x")
    assert reader is not None
    said = reader.push(f"<|tool_calls_section_begin|>{calls}") + reader.flush(cut=False)
    return [call["id"] for call in together([call for part in said for call in part.calls])]


def test_two_calls_never_have_one_id() -> None:
    assert ids_of("functions.clock:1", "functions.clock:1", "functions.clock:1") == [
        "functions.clock:1",
        "functions.clock:2",
        "functions.clock:3",
    ]


pieces_of_outputs = st.sampled_from(
    [
        *("f", "clock", "other", '{"name": "f", "arguments": {"a": "x"}}', '{"name": "clock"}'),
        *"{}[]()<>\"',:=;\\ \n1é🎉",
        *("a=1", "[f(a='x')]", "f(a='x')", "null", "</", "functions.f:0", "```json\n", "```"),
        *("to=functions.f", "commentary", "analysis", "final", "assistant", "<think>", "</think>"),
        *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>a</arg_key>"),
        *("<arg_value>", "</arg_value>", '<invoke name="f">', "</invoke>", '<parameter name="a">'),
        *('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">'),
        *("</｜DSML｜parameter>", "</｜DSML｜invoke>", *MARKS),
    ]
)


@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize("writer", WRITERS)
@given(data=st.data())
@settings(max_examples=15)
def test_any_output_is_read_alike_in_any_pieces(
    writer: str, marks: list[str], data: st.DataObject
) -> None:
    """Changes the text of the calls at one place, and appends any text."""
    mark, write = WRITERS[writer]
    text = write([("f", {"a": "x<y", "b": 3}), ("clock", {})])
    begin = data.draw(st.integers(0, len(text)))
    end = begin + data.draw(st.integers(0, 6))
    text = text[:begin] + data.draw(pieces_of_outputs) + text[end:]
    text += "".join(data.draw(st.lists(pieces_of_outputs, max_size=8)))
    tokenizer = MarkTokenizer(f"tools {mark} <think> </think>", marks)
    model, cut = ModelOutput(tokenizer), data.draw(st.booleans())
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "<think>"])))
    found = []
    for step in (1, data.draw(st.integers(2, 9)), len(text) + 1):
        ids = iter(range(100, 10_000))
        next_id = lambda ids=ids: str(next(ids))  # noqa: E731
        reader, shown = model.reader(prompt, True, CallRules(FUNCTIONS), next_id)
        assert reader is not None
        stream = tokenizer.stream(True, shown)
        tokens = [*map(stream.push, tokenizer.encode(text)), stream.flush()]
        joined = ["".join(tokens[at : at + step]) for at in range(0, len(tokens), step)]
        said = [part for piece in joined for part in reader.push(piece)] + reader.flush(cut)
        calls = together([call for part in said for call in part.calls])
        texts = ["".join(s.text for s in said), "".join(s.reasoning for s in said)]
        found.append(json.dumps([texts, calls], ensure_ascii=False).encode())
    assert found[0] == found[1] == found[2]


LONG = 60_000
LONG_OUTPUTS = {
    "text with beginnings of marks": ("<tool_call>", "<tool_" * (LONG // 6)),
    "white space": ("<tool_call>", " " * LONG),
    "white space before a call": ("", "[f" + " " * LONG),
    "arguments before the name": (
        "<tool_call>",
        f'<tool_call>{{"arguments": {{"a": "{"x" * LONG}"}}, "name": "f"}}</tool_call>',
    ),
    "JSON that is no call": ("", f'{{"a": "{"x" * LONG}"}}'),
    "Python": ("", f"[f(a='{'x' * LONG}')]"),
    "marks that begin no call": ("<tool_call>", '<tool_call>{"x":[' * (LONG // 17)),
    "tags in a value": (
        "<tool_call>",
        "<tool_call><function=f><parameter=a>" + "</parameter> x" * (LONG // 14),
    ),
}


@pytest.mark.parametrize("kind", LONG_OUTPUTS)
def test_the_work_for_an_output_grows_with_its_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser must add each piece to a short text, and must not read any character often."""
    template, text = LONG_OUTPUTS[kind]
    copied, sources, add = [0], set[TextSource](), TextSource.add

    def counted(source: TextSource, new: str) -> None:
        add(source, new)
        sources.add(source)
        copied[0] += len(source._text)

    monkeypatch.setattr(TextSource, "add", counted)
    model = ModelOutput(MarkTokenizer(f"tools {template}", []))
    reader, _ = model.reader([], True, CallRules(FUNCTIONS), lambda: "")
    assert isinstance(reader, OutputReader)
    said = [part for at in range(0, len(text), 4) for part in reader.push(text[at : at + 4])]
    said += reader.flush(cut=False)
    assert said
    assert copied[0] < 5000 * len(text) / 4
    [source] = sources
    assert source.num_reread < 9 * len(text) + (1 << 17)
