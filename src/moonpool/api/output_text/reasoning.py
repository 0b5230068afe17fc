"""Reasoning: what a model writes before its answer, between tags such as `<think>` and `</think>`.

Some chat templates end with the opening tag, so that the output begins within it. Text without tags
is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.api.output_text.marks import Marks
from moonpool.api.output_text.said import Sink
from moonpool.api.output_text.source import Steps, TextSource


class ReasoningTags(NamedTuple):
    """`answer`: tags that some models write around the answer too."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    answer: tuple[str, str] | None = None

    def in_template(self, template: str) -> bool:
        return any(tag in template for tag in self.closes)


THINK = ReasoningTags(("<think>",), ("</think>",), ("<response>", "</response>"))
SEED = ReasoningTags(("<seed:think>",), ("</seed:think>",))
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",))
GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
ALL_TAGS = (THINK, SEED, MISTRAL, GRANITE)


def read_reasoning(
    source: TextSource,
    sink: Sink,
    tags: ReasoningTags,
    is_inside: bool,
    call_marks: Sequence[str],
    read_call: Callable[[str], Steps[bool]],
) -> Steps[None]:
    """Reads the reasoning at the beginning of an output, if there is any, up to the answer.

    A tool call ends the reasoning, too. `call_marks`: the marks that begin calls; `read_call` reads
    a call from after its mark on.
    """
    if not is_inside and not (yield from source.attempt(_take_opening(source, tags))):
        return
    yield from source.skip("\n")
    marks = Marks((*tags.closes, *call_marks))
    while (tag := (yield from source.until(marks, sink.reason))) in call_marks:
        if (yield from read_call(tag)):
            return
        sink.reason(tag)
    yield from source.skip("\n")


def _take_opening(source: TextSource, tags: ReasoningTags) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(*tags.opens)))
