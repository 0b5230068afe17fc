"""gpt-oss's format, harmony: an output is a sequence of messages, each with a header.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The recipient may also stand before the channel, or after the form of the body. Text on the
commentary channel without a recipient is for the user, such as what a model says before it calls.
An output without a header is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from moonpool.api.output_text.call_writer import CallWriter
from moonpool.api.output_text.marks import Marks, MarkSigns
from moonpool.api.output_text.said import Sink
from moonpool.api.output_text.source import Say, Script, Steps, TextSource

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_LONGEST_HEADER_CHARS = 512
ReadRequired = Callable[[TextSource, CallWriter, Marks], Steps[None]]
"""Reads required calls in a text that ends at one of the marks."""
_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?(\S+)")


def harmony_script(
    signs: MarkSigns,
    calls_of: Callable[[TextSource, Sink], CallWriter],
    tells_reasoning: bool,
    read_required: ReadRequired | None = None,
) -> Script:
    """Returns the script that reads one output. The prompt has already opened the header of its
    first message.

    tells_reasoning: whether reasoning is told apart from the text. read_required: reads calls if a
    grammar requires them.
    """

    def script(source: TextSource, sink: Sink) -> Steps[None]:
        messages = _Messages(source, sink, calls_of(source, sink), signs)
        messages.tells_reasoning = tells_reasoning
        messages.read_required = read_required
        yield from messages.read()

    return script


class _Messages:
    """Reads the messages of one output."""

    def __init__(self, source: TextSource, sink: Sink, calls: CallWriter, signs: MarkSigns) -> None:
        self._source = source
        self._sink = sink
        self._calls = calls
        self._start, self._channel = signs.of(START), signs.of(CHANNEL)
        self._constrain = signs.of(CONSTRAIN)
        self._message = Marks((signs.of(MESSAGE),))
        self._ends = Marks(tuple(map(signs.of, (END, CALL, RETURN, START, CHANNEL))))
        self.tells_reasoning = True
        self.read_required: ReadRequired | None = None
        self._has_reasoned = False
        self._has_said = False

    def read(self) -> Steps[None]:
        source = self._source
        marks = (*self._ends.texts, *self._message.texts)
        begins = ("to=", f"assistant{self._channel}", *marks)
        if not (yield from source.comes(_takes(source, begins))):
            yield from self._pass_text()
        while (yield from source.peek()):
            header = yield from source.before(self._message, _LONGEST_HEADER_CHARS)
            if header is None:
                yield from self._without_body()
            else:
                yield from self._body(header[0])

    def _without_body(self) -> Steps[None]:
        """A header without a message is hidden if a limit cut it, and is text otherwise."""
        if self._source.end == "cut":
            self._source.rest()
            return
        self._sink.say((yield from self._source.take(self._start, self._channel)))
        yield from self._pass(self._sink.say)

    def _body(self, header: str) -> Steps[None]:
        before, _, channel = header.replace(self._constrain, " ").rpartition(self._channel)
        kind = (channel.split() or [""])[0]
        found = _RECIPIENT.search(before) or _RECIPIENT.search(channel)
        if found is not None and self._calls.knows(found[1]):
            self._calls.begin(found[1])
            if (yield from self._pass(self._calls.add)) or self._source.end == "stop":
                self._calls.end()
        elif kind == "analysis" and self.tells_reasoning:
            if self._has_reasoned:
                self._sink.reason("\n")
            self._has_reasoned = True
            yield from self._pass(self._sink.reason)
        else:
            yield from self._pass_text()

    def _pass_text(self) -> Steps[None]:
        if self._has_said:
            self._sink.say("\n")
        else:
            self._source.begin_answer()
        self._has_said = True
        if self.read_required is not None:
            yield from self.read_required(self._source, self._calls, self._ends)
        yield from self._pass(self._sink.say)

    def _pass(self, say: Say) -> Steps[str]:
        """Passes on a message's body, and reads on to the next header. Returns the mark between the
        body and the next header."""
        mark = yield from self._source.until(self._ends, say)
        if mark == self._channel:  # the mark that ends the message is missing
            self._source.unread(len(mark))
        elif mark and mark != self._start:
            yield from self._source.take(self._start)
        return mark


def _takes(source: TextSource, texts: tuple[str, ...]) -> Steps[bool]:
    yield from source.skip_space()
    return bool((yield from source.take(*texts)))
