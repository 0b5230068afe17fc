"""Answers that are nothing but calls: JSON or Python without marks around it, as Llama 3 and 4
write them. Several JSON calls stand in a list, or have semicolons between them."""

from __future__ import annotations

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.json_calls import read_calls
from moonpool.api.output_text.pythonic_calls import read_pythonic
from moonpool.api.output_text.source import Steps, TextSource

_BEGINS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"


def read_bare(source: TextSource, calls: CallWriter) -> Steps[bool]:
    """Reads the calls at the beginning of an answer. Returns False if it does not begin so."""
    yield from source.skip_space()
    yield from source.take(*_BEGINS)  # mostly a special token without text
    if (yield from source.peek()) == "[" and (yield from source.comes(_is_pythonic(source))):
        yield from source.take("[")
        is_call = yield from read_pythonic(source, calls, "]")
        if is_call:
            yield from source.take(_END)
        return is_call
    num_calls = 0
    while (yield from source.attempt(_read_next(source, calls, is_first=not num_calls))):
        num_calls += 1
    return num_calls > 0


def _is_pythonic(source: TextSource) -> Steps[bool]:
    yield from source.take("[")
    yield from source.skip_space()
    first = yield from source.peek()
    return first.isalpha() or first == "_"


def _read_next(source: TextSource, calls: CallWriter, is_first: bool) -> Steps[bool]:
    yield from source.skip_space()
    if not is_first:
        yield from source.take(";")
        yield from source.skip_space()
    if (yield from source.peek()) not in ("{", "["):
        return False
    return (yield from read_calls(source, calls))
