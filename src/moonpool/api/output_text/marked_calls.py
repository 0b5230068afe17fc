"""Tool calls between `<tool_call>` and `</tool_call>`, in the forms that are common there: JSON
(Hermes, Qwen, Granite 4, EXAONE, ERNIE), tagged arguments (Qwen3-Coder, GLM), and a list of JSON
without a closing mark (Granite 3, Phi-4-mini). Other model families write tagged arguments or
Python between other marks."""

from __future__ import annotations

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.json_calls import read_calls
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.pythonic_calls import read_pythonic
from moonpool.api.output_text.source import Steps, TextSource
from moonpool.api.output_text.tagged_calls import FunctionTags, read_function, read_pairs

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
GRANITE_CALL, PHI_CALL, PHI_CALL_END = "<|tool_call|>", "functools", "<|/tool_call|>"
QWEN_TAGS = FunctionTags()
SEED_TAGS = FunctionTags(wraps_values=False)
MINIMAX_TAGS = FunctionTags(
    '<invoke name="', "</invoke>", '<parameter name="', "</parameter>", wraps_values=False
)
DEEPSEEK_TAGS = FunctionTags(
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
    wraps_values=False,
)
_STRAY = " \n\r\t]}"


def read_tool_call(
    source: TextSource, calls: CallWriter, signs: MarkSigns, mark: str
) -> Steps[bool]:
    """Reads the calls after a mark, and the closing mark if there is one."""
    ends = Marks((signs.of(TOOL_CALL_END), signs.of(PHI_CALL_END)))
    if mark == signs.of(QWEN_TAGS.function):  # the mark before the tag is missing
        is_call = yield from read_function(source, calls, QWEN_TAGS, ends)
    else:
        is_call = yield from _read_one(source, calls, ends, has_pairs=True)
    if not is_call:
        return False
    while (yield from source.attempt(_read_one(source, calls, ends, has_pairs=False))):
        pass
    yield from source.attempt(_take_end(source, ends))
    return True


def _read_one(source: TextSource, calls: CallWriter, ends: Marks, has_pairs: bool) -> Steps[bool]:
    yield from source.skip_space()
    if (yield from source.peek()) in ("{", "["):
        return (yield from read_calls(source, calls, ends))
    if (yield from source.take(QWEN_TAGS.function)):
        return (yield from read_function(source, calls, QWEN_TAGS, ends))
    return has_pairs and (yield from read_pairs(source, calls, ends))


def read_functions(
    source: TextSource, calls: CallWriter, signs: MarkSigns, tags: FunctionTags, end: str
) -> Steps[bool]:
    """Reads one or more calls with these tags, and the closing mark."""
    own = tags.seen(signs)
    ends, num_calls = Marks((signs.of(end),)), 0
    while (yield from source.attempt(_read_tagged(source, calls, own, ends))):
        num_calls += 1
    if num_calls:
        yield from source.attempt(_take_end(source, ends))
    return num_calls > 0


def _read_tagged(
    source: TextSource, calls: CallWriter, tags: FunctionTags, ends: Marks
) -> Steps[bool]:
    yield from source.skip_space()
    if not (yield from source.take(tags.function)):
        return False
    return (yield from read_function(source, calls, tags, ends))


def read_python(source: TextSource, calls: CallWriter, end: str) -> Steps[bool]:
    """Reads calls in the form of Python up to a closing mark, with or without a list's brackets."""
    yield from source.skip_space()
    ends = Marks((end,))
    has_bracket = bool((yield from source.take("[")))
    if not (yield from read_pythonic(source, calls, "]" if has_bracket else end)):
        return False
    if has_bracket:
        yield from source.attempt(_take_end(source, ends))
    return True


def _take_end(source: TextSource, ends: Marks) -> Steps[bool]:
    """Reads a closing mark, also after a superfluous bracket."""
    yield from source.skip(_STRAY)
    return bool((yield from source.take(*ends.texts)))
