"""How the outputs of one model are read: its format of calls, its tags of reasoning, and the
special tokens among their marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from moonpool.api.output_text.call_writer import CallWriter, Functions
from moonpool.api.output_text.formats import (
    AUTO,
    BARE,
    HARMONY,
    NONE,
    CallFormat,
    call_format,
    reasoning_tags,
)
from moonpool.api.output_text.grammar import Tag, behind_reasoning
from moonpool.api.output_text.harmony import MARKS as HARMONY_MARKS
from moonpool.api.output_text.harmony import harmony_script
from moonpool.api.output_text.json_calls import NO_MARKS, read_bare, read_calls
from moonpool.api.output_text.marks import Marks, MarkSigns, is_special
from moonpool.api.output_text.reasoning import ReasoningTags, read_reasoning
from moonpool.api.output_text.said import Sink
from moonpool.api.output_text.source import OutputReader, Script, Steps, TextSource
from moonpool.text.tokenizer import Tokenizer

_LAST_TOKENS = 16
"""The opening tag at the end of a prompt lies within this many tokens."""


class CallRules(NamedTuple):
    """Which tool calls one output may have. `functions`: the schema of the parameters of each
    function.

    `must_call`: whether a grammar requires a JSON list of calls; with `named`, the arguments of
    that function's call.
    """

    functions: Functions
    only_one: bool = False
    must_call: bool = False
    named: str = ""
    num_before: int = 0  # number of calls earlier in the conversation


class ModelOutput:
    """Makes the readers of one model's outputs."""

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """Raises `UnknownParserError`."""
        self._tokenizer = tokenizer
        template = tokenizer.tool_template or ""
        self._reads_reasoning = reasoning_parser != NONE
        self._tags = reasoning_tags(reasoning_parser, template)
        self._format = call_format(tool_parser, template)
        self._is_harmony = call_format(AUTO, template) is HARMONY or self._format is HARMONY
        marks: tuple[str, ...] = () if self._format is None else self._format.marks
        marks += HARMONY_MARKS if self._is_harmony else ()
        if self._tags is not None:
            marks += (*self._tags.opens, *self._tags.closes)
        opens = () if self._format is None else self._format.opens
        self._opens = tuple(mark for mark in opens if mark in template) or opens
        self._special = MarkSigns(tokenizer, marks)
        self._spelled = MarkSigns(tokenizer, marks, are_skipped=False)

    def reader(
        self,
        prompt: Sequence[int],
        skips_special_tokens: bool,
        rules: CallRules | None,
        next_id: Callable[[], str],
        reads_reasoning: bool = True,
        may_not_reason: bool = False,
    ) -> tuple[OutputReader | None, Mapping[int, str]]:
        """Returns the reader of the output for a prompt, or None if the output is only text, and
        the texts by which special tokens must be shown to the reader.

        `rules`: the rules of calls; None means no calls. `next_id`: random texts for the ids of
        calls. `may_not_reason`: whether the output may be JSON at once, although the prompt has
        opened reasoning.
        """
        signs = self._special if skips_special_tokens else self._spelled
        plan = _Plan(self._format, self._opens, rules, signs, next_id)
        if self._is_harmony:
            read_required = plan.read_required if plan.must_call else None
            script = harmony_script(signs, plan.writer, self._reads_reasoning, read_required)
            return OutputReader(script), signs.shown
        tags = self._tags if reads_reasoning else None
        if tags is None and not plan.reads_calls:
            return None, {}
        is_inside = tags is not None and self._end_of(prompt).endswith(tags.opens)
        script = plan.script(tags, is_inside, may_not_reason)
        return OutputReader(script), signs.shown

    def grammar_behind_reasoning(self, grammar: str, prompt: Sequence[int]) -> str | None:
        """Returns a grammar that lets the model reason before the answer, as its prompt asks for.

        Returns None if the model does not reason, or its reasoning has no single closing tag.
        """
        tags = self._tags
        if tags is None or len(tags.closes) > 1 or self._is_harmony:
            return None
        end = self._end_of(prompt)
        if end.endswith(tags.closes):  # the template has removed the reasoning
            return None
        opening, closing = tags.opens[0], tags.closes[0]
        ids = {sign: token_id for token_id, sign in self._special.shown.items()}
        begin, stop = (Tag(mark, ids.get(self._special.of(mark))) for mark in (opening, closing))
        return behind_reasoning(grammar, begin, stop, is_open=end.endswith(tags.opens))

    def _end_of(self, prompt: Sequence[int]) -> str:
        last = list(prompt[-_LAST_TOKENS:])
        return self._tokenizer.decode(last, skip_special_tokens=False).rstrip()


class _Plan:
    """How one output is read."""

    def __init__(
        self,
        form: CallFormat | None,
        opens: Sequence[str],
        rules: CallRules | None,
        signs: MarkSigns,
        next_id: Callable[[], str],
    ) -> None:
        """`opens`: the marks of the format with which calls begin."""
        self.must_call = rules is not None and rules.must_call
        self.reads_calls = rules is not None and (rules.must_call or form is not None)
        self._rules = rules if rules is not None and self.reads_calls else CallRules({})
        self._format = form
        self._make_id = BARE.make_id if form is None else form.make_id
        self._signs = signs
        self._next_id = next_id
        self._marks = tuple(opens) if self.reads_calls and not self.must_call else ()
        self._opens = tuple(map(signs.of, self._marks))

    def writer(self, source: TextSource, sink: Sink) -> CallWriter:
        rules = self._rules

        def new_id(name: str, number: int, own: str) -> str:
            return self._make_id(name, number, own, self._next_id())

        limits = (rules.functions, rules.only_one, rules.num_before)
        return CallWriter(*limits, new_id, self._signs.spelled, source, sink)

    def script(self, tags: ReasoningTags | None, is_inside: bool, may_not_reason: bool) -> Script:
        """`tags`: the tags of reasoning. `is_inside`: whether the output begins after the opening
        tag, unless `may_not_reason` and it is JSON."""
        if tags is not None:
            opens, closes = (tuple(map(self._signs.of, t)) for t in (tags.opens, tags.closes))
            tags = tags._replace(opens=opens, closes=closes)

        def script(source: TextSource, sink: Sink) -> Steps[None]:
            begins_inside = is_inside
            if is_inside and may_not_reason:
                begins_inside = not (yield from source.comes(_json(source)))
            calls = self.writer(source, sink)
            if tags is not None:
                yield from self._reasoning(source, sink, calls, tags, begins_inside)
                source.begin_answer()
            if self.must_call:
                yield from self.read_required(source, calls, NO_MARKS)
            elif self.reads_calls and not self._opens:
                yield from self._whole(source, read_bare(source, calls))
            yield from self._answer(source, sink, calls, tags)

        return script

    def read_required(self, source: TextSource, calls: CallWriter, ends: Marks) -> Steps[None]:
        """Reads calls that a grammar requires. `ends`: the marks that may follow the calls."""
        if self._rules.named:
            if (yield from source.peek()):
                calls.begin(self._rules.named)
                mark = yield from source.until(ends, calls.add)
                source.unread(len(mark))
                if mark or source.end == "stop":
                    calls.end()
            return
        yield from self._whole(source, read_calls(source, calls))
        if source.end == "cut":  # the call that has begun has no name yet
            source.rest()

    def _whole(self, source: TextSource, steps: Steps[bool]) -> Steps[bool]:
        """Reads calls. The remainder of a call that a limit has cut is not text."""
        is_call = yield from source.attempt(steps)
        if is_call and source.end == "cut":
            source.rest()
        return is_call

    def _answer(
        self, source: TextSource, sink: Sink, calls: CallWriter, tags: ReasoningTags | None
    ) -> Steps[None]:
        """Reads text with calls in between, and more reasoning if its tag is a special token."""
        thinks = () if tags is None else tuple(filter(is_special, tags.opens))
        response, response_end = (tags and tags.answer) or ("", "")
        if response and (yield from source.attempt(_take(source, response))):
            yield from source.skip("\n")
        else:
            response_end = ""
        marks = Marks(tuple(filter(None, (*self._opens, *thinks, response_end))))
        while mark := (yield from source.until(marks, sink.say)):
            if mark == response_end:
                yield from source.skip_space()
            elif tags is not None and mark in thinks:
                source.unread(len(mark))
                yield from self._reasoning(source, sink, calls, tags, False)
            elif not (yield from self._marked(source, calls, mark)):
                sink.say(mark)

    def _reasoning(
        self,
        source: TextSource,
        sink: Sink,
        calls: CallWriter,
        tags: ReasoningTags,
        is_inside: bool,
    ) -> Steps[None]:
        """Reads reasoning. A call ends the reasoning if the call's mark is a token that text seldom
        has."""
        marks = [self._signs.of(mark) for mark in self._marks if mark in self._signs.tokens]
        read_call = partial(self._marked, source, calls)
        yield from read_reasoning(source, sink, tags, is_inside, marks, read_call)

    def _marked(self, source: TextSource, calls: CallWriter, mark: str) -> Steps[bool]:
        """Reads calls behind their mark. Returns False, and reads nothing, if no call follows."""
        assert self._format is not None
        assert self._format.read is not None
        steps = self._format.read(source, calls, self._signs, mark)
        if (yield from self._whole(source, steps)):
            yield from source.skip("\n")
            return True
        if source.end == "cut":  # the call that has begun has no name yet
            source.rest()
        return source.end == "cut"


def _json(source: TextSource) -> Steps[bool]:
    yield from source.skip_space()
    return (yield from source.peek()) in ("{", "[", '"')


def _take(source: TextSource, text: str) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(text)))
