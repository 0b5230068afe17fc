"""Tool calls whose name stands before their arguments, which are JSON: the formats of DeepSeek,
Kimi K2 and Mistral. Special tokens stand between the parts."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.json_calls import NO_MARKS, pass_value, read_calls
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.source import Steps, TextSource

_LONGEST_NAME_CHARS = 256


class DeepSeekMarks:
    """V3 and R1 write the kind of the tool before the mark, and the name and a code block after it;
    V3.1 writes the name before the mark, and only the arguments after it."""

    section = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call = "<｜tool▁call▁begin｜>"
    separator = "<｜tool▁sep｜>"
    call_end = "<｜tool▁call▁end｜>"
    all = (section, section_end, call, separator, call_end)


class KimiMarks:
    """The name stands in the call's id, `functions.NAME:NUMBER`."""

    section = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>"
    arguments = "<|tool_call_argument_begin|>"
    call_end = "<|tool_call_end|>"
    all = (section, section_end, call, arguments, call_end)


class MistralMarks:
    """Older models write a list of calls after the mark, newer models a name, perhaps an id, and
    arguments."""

    calls = "[TOOL_CALLS]"
    call_id = "[CALL_ID]"
    arguments = "[ARGS]"
    all = (calls, call_id, arguments)


def read_deepseek(
    source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str
) -> Steps[bool]:
    begin, section_end = signs.of(DeepSeekMarks.call), signs.of(DeepSeekMarks.section_end)
    ends = Marks((signs.of(DeepSeekMarks.call_end), section_end))
    is_begun, num_calls = mark == begin, 0
    while True:
        call = _deepseek_call(source, calls, signs, ends, "" if is_begun else begin)
        if not (yield from source.attempt(call)):
            break
        is_begun, num_calls = False, num_calls + 1
        yield from source.skip("\n` ")
        yield from source.take(signs.of(DeepSeekMarks.call_end))
    yield from _take_end(source, section_end, num_calls)
    return num_calls > 0


def _deepseek_call(
    source: TextSource, calls: CallWriter, signs: MarkSigns, ends: Marks, begin: str
) -> Steps[bool]:
    if not (yield from _take_begin(source, begin)):
        return False
    separator = Marks((signs.of(DeepSeekMarks.separator),))
    found = yield from source.before(separator, _LONGEST_NAME_CHARS)
    if found is None:
        return False
    name = found[0].strip()
    block = yield from source.before(Marks(("{", *ends.texts)), _LONGEST_NAME_CHARS)
    if block is None:
        return False
    source.unread(len(block[1]))
    if before := block[0].strip():  # the name comes after the kind of the tool
        name, _, fence = (part.strip() for part in before.partition("\n"))
        if block[1] != "{" and fence.replace("json", "").strip("`\n "):
            return False
    return (yield from _pass_call(source, calls, name, "", ends))


def read_kimi(source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str) -> Steps[bool]:
    begin, section_end = signs.of(KimiMarks.call), signs.of(KimiMarks.section_end)
    ends = Marks((signs.of(KimiMarks.call_end), section_end))
    is_begun, num_calls = mark == begin, 0
    while True:
        call = _kimi_call(source, calls, signs, ends, "" if is_begun else begin)
        if not (yield from source.attempt(call)):
            break
        is_begun, num_calls = False, num_calls + 1
        yield from source.skip_space()
        yield from source.take(signs.of(KimiMarks.call_end))
    yield from _take_end(source, section_end, num_calls)
    return num_calls > 0


def _kimi_call(
    source: TextSource, calls: CallWriter, signs: MarkSigns, ends: Marks, begin: str
) -> Steps[bool]:
    if not (yield from _take_begin(source, begin)):
        return False
    arguments = Marks((signs.of(KimiMarks.arguments),))
    found = yield from source.before(arguments, _LONGEST_NAME_CHARS)
    own_id = "" if found is None else found[0].strip()
    name = (own_id.rpartition(":")[0] or own_id).removeprefix("functions.")
    return (yield from _pass_call(source, calls, name, own_id, ends))


def read_mistral(source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str) -> Steps[bool]:
    yield from source.skip_space()
    if (yield from source.peek()) in ("[", "{"):
        return (yield from read_calls(source, calls))
    call_id, arguments = signs.of(MistralMarks.call_id), signs.of(MistralMarks.arguments)
    own_id, tags = "", Marks((call_id, arguments, mark, "{"))
    found = yield from source.before(tags, _LONGEST_NAME_CHARS)
    if found is None:  # a name without arguments is a complete call
        return source.end == "stop" and _add_empty(calls, source.rest().strip(), "")
    name, tag = found[0].strip(), found[1]
    if tag == call_id:
        found = yield from source.before(Marks((arguments, mark, "{")), _LONGEST_NAME_CHARS)
        own_id, tag = ("", "") if found is None else (found[0].strip(), found[1])
    if tag in ("{", mark):
        source.unread(len(tag))
    return (yield from _pass_call(source, calls, name, own_id, NO_MARKS, (mark,)))


def _take_begin(source: TextSource, *begins: str) -> Steps[bool]:
    """Reads a mark, such as the mark before a call, unless it was read already ("")."""
    if not any(begins):
        return True
    yield from source.skip_space()
    return bool((yield from source.take(*begins)))


def _take_end(source: TextSource, section_end: str, num_calls: int) -> Steps[None]:
    if num_calls:
        yield from source.attempt(_take_begin(source, section_end))


def _pass_call(
    source: TextSource,
    calls: CallWriter,
    name: str,
    own_id: str,
    ends: Marks,
    others: Sequence[str] = (),
) -> Steps[bool]:
    """Passes on the arguments of a call to the function `name`. Returns False unless the function
    exists, and its arguments are an object or missing. `ends`: the marks that end the arguments.
    `others`: texts that may come in place of arguments."""
    yield from source.skip_space()
    if not calls.knows(name):
        return False
    next_one = yield from source.peek()
    if next_one != "{":
        is_over = source.end == "stop" and not next_one
        is_over = is_over or (yield from source.comes(_take_begin(source, *ends.texts, *others)))
        return is_over and _add_empty(calls, name, own_id)
    calls.begin(name, own_id)
    if (yield from pass_value(source, calls.add, ends)):
        calls.end()
    return True


def _add_empty(calls: CallWriter, name: str, own_id: str) -> bool:
    if calls.knows(name):
        calls.begin(name, own_id)
        calls.end()
    return calls.knows(name)
