"""Tests the formats of calls and reasoning of many families, in transcripts that their own chat
templates wrote. Each transcript must be read back to its original parts, in any pieces, and with
the results of vLLM's parsers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outputs import FUNCTIONS, MARKS, TRANSCRIPTS, WRITERS, Calls, MarkTokenizer, Reading

from moonpool.api.output_text.formats import (
    CALL_PARSERS,
    REASONING_PARSERS,
    UnknownParserError,
    check_parsers,
)
from moonpool.api.output_text.model_output import CallRules, ModelOutput
from moonpool.api.output_text.said import Said
from moonpool.api.tools import together

families = pytest.mark.parametrize("family", TRANSCRIPTS)
steps = pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.long)])


@families
@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
def test_a_transcript_is_read_back(family: str, marks: list[str]) -> None:
    text = TRANSCRIPTS[family]["text"]
    reading = Reading(family, marks)
    reading.tokens(reading.tokenizer.encode(text)).check()
    if marks:  # for a client that asks for special tokens in its text
        reading = Reading(family, marks, skips=False)
        reading.tokens(reading.tokenizer.encode(text)).check()


@families
@steps
def test_the_pieces_do_not_matter(family: str, step: int) -> None:
    text = TRANSCRIPTS[family]["text"]
    whole = Reading(family, []).pieces(text)
    whole.check()
    for at in range(len(family) % step, len(text), step):
        split = Reading(family, []).pieces(text[:at], text[at:])
        assert (split.text, split.reasoning, split.calls) == (
            whole.text,
            whole.reasoning,
            whole.calls,
        )


@families
@steps
@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
def test_a_cut_output_has_the_beginnings_of_what_it_would_have(
    family: str, marks: list[str], step: int
) -> None:
    """A limit must neither lose nor double text, nor turn a part of the output into another
    kind."""
    whole = Reading(family, marks)
    ids = whole.tokenizer.encode(TRANSCRIPTS[family]["text"])
    whole.tokens(ids)
    for size in range(len(family) % step, len(ids), step):
        cut = whole.tokenizer.decode(ids[:size], skip_special_tokens=True)
        if cut.endswith("\ufffd"):
            continue
        part = Reading(family, marks).tokens(ids[:size], cut=True)
        # Text that could have become a mark, or a call without marks, is sent unchanged.
        pairs = enumerate(zip(part.text, whole.text, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(part.text), len(whole.text)))
        assert cut.endswith(part.text[common:])
        assert len(part.calls) <= len(whole.calls)
        for (name, arguments), (full_name, full) in zip(
            part.arguments, whole.arguments, strict=False
        ):
            assert name == full_name and full.startswith(arguments)
        assert [c["id"] for c in part.calls] == [c["id"] for c in whole.calls[: len(part.calls)]]


@families
def test_vllms_own_parsers_find_the_same(family: str) -> None:
    entry = TRANSCRIPTS[family]
    found = entry["vllm"]
    if family in NOT_AS_VLLM:
        pytest.skip(NOT_AS_VLLM[family])
    reading = Reading(family, MARKS)
    reading.tokens(reading.tokenizer.encode(entry["text"]))
    ours = [(name, json.loads(arguments)) for name, arguments in reading.arguments]
    assert ours == [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    assert reading.text.strip() == found["content"].strip()
    assert reading.reasoning.strip() == found["reasoning"].strip()


NOT_AS_VLLM: dict[str, str] = {
    "gpt-oss": "vLLM's parser downloads its vocabulary",
    "Mistral Small 3.2": "vLLM knows no [CALL_ID] and takes it for a part of the name",
    "Phi-4-mini": "vLLM ends the list at its first bracket",
    "Seed-OSS": "the template writes lists as Python, which vLLM leaves as text",
}


ends = ("</parameter>", "<parameter", "</function", "</arg_value>", "｜", *MARKS)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda text: not any(end in text for end in ends) and text.strip() != "null"
)
values = st.one_of(
    texts,
    st.sampled_from(['"', "\\", "</tool_call", "{", "]}", "<", "a\n", "\n", "'"]),
    st.integers(-(10**15), 10**15),
    st.booleans(),
    st.lists(st.one_of(st.integers(0, 9), texts), max_size=3),
    st.dictionaries(texts, st.integers(0, 9), max_size=2),
)
random_calls = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_weather", "a.b-c"]),
        st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,7}", fullmatch=True), values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
KINDS = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}


def read_random(
    writer: str, calls: Calls, text: str, cuts: list[int], marks: list[str]
) -> tuple[str, Calls]:
    """Reads a text with functions whose schemas the calls satisfy."""
    functions: dict[str, Any] = {}
    for name, arguments in calls:
        schema = functions.setdefault(name, {"type": "object", "properties": {}})
        schema["properties"] |= {key: {"type": KINDS[type(v)]} for key, v in arguments.items()}
    tokenizer = MarkTokenizer(f"tools {WRITERS[writer][0]}", marks)
    reader, shown = ModelOutput(tokenizer).reader(
        [], True, CallRules(functions), lambda: "abcdefghi"
    )
    assert reader is not None
    stream = tokenizer.stream(True, shown)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    joined, said = "".join(pieces), list[Said]()
    for begin, end in zip([0, *cuts], [*cuts, len(joined)], strict=True):
        said += reader.push(joined[begin:end])
    said += reader.flush(cut=False)
    found = [call["function"] for call in together([call for part in said for call in part.calls])]
    return "".join(part.text for part in said), [
        (function["name"], json.loads(function["arguments"])) for function in found
    ]


@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize("writer", WRITERS)
@given(calls=random_calls, cuts=st.lists(st.integers(0, 400), max_size=4).map(sorted))
@settings(max_examples=8)
def test_random_calls_are_read_back(
    writer: str, marks: list[str], calls: Calls, cuts: list[int]
) -> None:
    merged: dict[str, dict[str, type]] = {}
    for name, arguments in calls:  # all calls of a function have one schema
        kinds = merged.setdefault(name, {})
        assume(all(kinds.setdefault(key, type(v)) is type(v) for key, v in arguments.items()))
    assert read_random(writer, calls, WRITERS[writer][1](calls), cuts, marks) == ("", calls)


@pytest.mark.parametrize("writer", WRITERS)
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=3).map(sorted))
@settings(max_examples=8)
def test_text_that_is_no_call_stays_text(writer: str, text: str, cuts: list[int]) -> None:
    """Calls of functions that do not exist must stay text, too."""
    assume(not text.isspace())
    begins = "" if writer == "harmony" else WRITERS[writer][1]([("other", {"a": 1})])
    for said in (text, f"{text} {begins} {text}", begins):
        found = read_random(writer, [("f", {})], said, cuts, [])
        assert found == (said, [])


@pytest.mark.parametrize("writer", ["kimi", "deepseek v3", "mistral", "harmony"])
def test_text_that_spells_special_tokens_is_no_call(writer: str) -> None:
    text = WRITERS[writer][1]([("f", {"a": 1})])
    tokenizer = MarkTokenizer(f"tools {WRITERS[writer][0]}", MARKS)
    reader, _ = ModelOutput(tokenizer).reader([], True, CallRules({"f": {}}), lambda: "")
    assert reader is not None
    said = reader.push(text) + reader.flush(cut=False)
    assert "".join(part.text for part in said) == text
    assert not any(part.calls for part in said)


@families
@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
@given(data=st.data())
@settings(max_examples=3)
def test_a_damaged_transcript_is_read_alike_in_any_pieces(
    family: str, marks: list[str], data: st.DataObject
) -> None:
    text = TRANSCRIPTS[family]["text"]
    places = st.integers(0, len(text))
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end = sorted((data.draw(places), data.draw(places)))
        instead = data.draw(
            st.one_of(
                st.sampled_from([*MARKS, *"{}[]()<>\"',=\\\n "]), st.just(text[begin:end] * 2)
            )
        )
        text = text[:begin] + instead + text[end:]
    cut, size = data.draw(st.booleans()), data.draw(st.integers(1, 40))
    readings = []
    for step in (1, size, len(text) + 1):
        reading = Reading(family, marks)
        ids = reading.tokenizer.encode(text)
        pieces = [reading.stream.push(token_id) for token_id in ids]
        joined = [pieces[at : at + step] for at in range(0, len(pieces), step)]
        readings.append(reading.pieces(*map("".join, joined), cut=cut))
    first = readings[0]
    assert msgspec.json.encode((first.text, first.reasoning, first.calls))
    for other in readings[1:]:
        assert (other.text, other.reasoning, other.calls) == (
            first.text,
            first.reasoning,
            first.calls,
        )


@pytest.mark.parametrize("deep", ["[", '{"a":', '{"function":', "("])
def test_no_depth_of_an_output_is_an_error(deep: str) -> None:
    for writer in WRITERS:
        _read_deep(writer, deep)


def _read_deep(writer: str, deep: str) -> None:
    begins = WRITERS[writer][1]([("f", {"a": 7})]).partition("7")[0]
    for text in (deep * 1200, begins + deep * 1200, deep * 400 + "7" + "]" * 400):
        for kind in ("array", "string"):
            functions = {"f": {"properties": {"a": {"type": kind}}}}
            model = ModelOutput(MarkTokenizer(f"tools {WRITERS[writer][0]}", []))
            reader, _ = model.reader([], True, CallRules(functions), lambda: "")
            assert reader is not None
            assert reader.push(text) + reader.flush(cut=False)


def test_ids_are_those_that_the_familys_template_takes() -> None:
    kimi = Reading("Kimi K2", MARKS)
    kimi.tokens(kimi.tokenizer.encode(kimi.entry["text"]))
    assert [call["id"] for call in kimi.calls] == ["functions.edit:0", "functions.clock:1"]
    required = Reading("Kimi K2", MARKS, must_call=True, num_before=4)
    required.pieces('[{"name": "clock", "parameters": {}}]')
    assert [call["id"] for call in required.calls] == ["functions.clock:4"]
    for family in ("Mistral Nemo", "Devstral", "Mistral Small 3.2"):
        mistral = Reading(family, MARKS)
        mistral.tokens(mistral.tokenizer.encode(mistral.entry["text"]))
        ids = [call["id"] for call in mistral.calls]
        assert all(len(i) == 9 and i.isalnum() for i in ids) and len(set(ids)) == 2


def test_parsers_are_found_by_vllms_names() -> None:
    for entry in TRANSCRIPTS.values():
        assert entry["tool_parser"] in CALL_PARSERS or entry["tool_parser"] == "openai"
        assert not entry["reasoning_parser"] or entry["reasoning_parser"] in REASONING_PARSERS
        check_parsers(entry["tool_parser"], entry["reasoning_parser"] or "none")
    for parsers in (("nonsense", "auto"), ("auto", "nonsense")):
        with pytest.raises(UnknownParserError, match=r"'nonsense' is unknown; use one of auto, "):
            check_parsers(*parsers)


def test_a_name_has_its_format_whatever_the_template() -> None:
    model = ModelOutput(MarkTokenizer("tools", []), "kimi_k2", "seed_oss")
    reader, _ = model.reader([], True, CallRules(FUNCTIONS), lambda: "")
    assert reader is not None
    kimi = TRANSCRIPTS["Kimi K2"]["text"]
    said = reader.push(f"<seed:think>so</seed:think>{kimi}") + reader.flush(cut=False)
    assert "".join(part.reasoning for part in said) == "so"
    assert [call.name for part in said for call in part.calls if call.name] == ["edit", "clock"]
    none = ModelOutput(MarkTokenizer("tools <tool_call> </think>", []), "none", "none")
    assert none.reader([], True, CallRules(FUNCTIONS), lambda: "") == (None, {})


def test_harmony_without_parsers_is_told_apart_from_its_headers_only() -> None:
    oss = TRANSCRIPTS["gpt-oss"]
    model = ModelOutput(MarkTokenizer("tools <|channel|>final", []), "none", "none")
    reader, _ = model.reader([], True, CallRules(FUNCTIONS), lambda: "")
    assert reader is not None
    said = reader.push(oss["text"]) + reader.flush(cut=False)
    text = "".join(part.text for part in said)
    assert text == f"{oss['reasoning']}\n{json.dumps(oss['calls'][0][1], ensure_ascii=False)}"
    assert not any(part.calls or part.reasoning for part in said)


HARMONY = [
    ("<|channel|>final<|message|>Hi", "", "Hi", []),
    ("Hi <b>", "", "Hi <b>", []),
    ('{"a": 1}', "", '{"a": 1}', []),
    (("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
     "<|end|><|start|>assistant<|channel|>final<|message|>c"), "a\nb", "c", []),
    (("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
     " to=functions.clock<|constrain|>json<|message|>{}<|call|>"), "", "I look.", ["clock"]),
    (" to=functions.clock<|channel|>commentary json<|message|>{}", "", "", ["clock"]),
    (" to=functions.other<|channel|>commentary json<|message|>{}", "", "{}", []),
    ("<|channel|>analysis to=browser.open<|message|>x", "x", "", []),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>commentary<|constrain|>json to=functions.clock<|message|>{}", "", "", ["clock"]),
    ("<|channel|>analysis to=functions.clock code<|message|>{}<|call|>", "", "", ["clock"]),
    ("<|channel|>commentary to=functions.clock<|message|><|call|>", "", "", ["clock"]),
    (("<|channel|>commentary to=functions.clock<|message|>{}<|call|><|start|>assistant<|channel|>"
     "analysis<|message|>a<|end|><|start|>assistant to=functions.clock<|channel|>commentary json"
     "<|message|>{}<|call|>"), "a", "", ["clock", "clock"]),
    ("<|start|>assistant<|channel|>final<|message|>Hi", "", "Hi", []),
    ("assistant<|channel|>final<|message|>Hi", "", "Hi", []),
    ("\n<|channel|>final<|message|>Hi", "", "Hi", []),
    ("<|end|><|start|>assistant<|channel|>final<|message|>Hi", "", "Hi", []),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>Hi", "a", "Hi", []),
    ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>Hi", "a", "Hi", []),
    ("Hi<|end|><|start|>assistant<|channel|>final<|message|>you", "", "Hi\nyou", []),
]  # fmt: skip


@pytest.mark.parametrize(("output", "reasoning", "text", "called"), HARMONY)
@pytest.mark.parametrize("marks", [[], MARKS], ids=["as text", "as tokens"])
def test_messages_of_harmony(
    output: str, reasoning: str, text: str, called: list[str], marks: list[str]
) -> None:
    reading = Reading("gpt-oss", marks)
    reading.tokens(reading.tokenizer.encode(output))
    assert (reading.reasoning, reading.text) == (reasoning, text)
    assert [name for name, _ in reading.arguments] == called


@pytest.mark.parametrize("begins", ["", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"])
@pytest.mark.parametrize("named", ["", "clock"])
@pytest.mark.parametrize("ends", ["", "<|return|>"])
def test_required_calls_stand_in_harmonys_text_or_alone(begins: str, named: str, ends: str) -> None:
    """vLLM lets gpt-oss reason before a form, but moonpool's engine does not."""
    reading = Reading("gpt-oss", MARKS, must_call=True, named=named)
    calls = "{}" if named else '[{"name": "clock", "parameters": {}}]'
    text = f"{begins}<|channel|>final<|message|>{calls}{ends}" if begins else calls
    reading.tokens(reading.tokenizer.encode(text))
    assert (reading.reasoning, reading.text) == ("a" if begins else "", "")
    assert reading.arguments == [("clock", "{}")]
