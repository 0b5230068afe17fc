"""The text of one output as it arrives, and the steps that read it.

A reader is a generator that yields where it waits for more text. So the reader of a format is
written as if the text were complete, and gives the same result however the text is divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Literal, TypeVar

from moonpool.api.output_text.marks import Marks
from moonpool.api.output_text.said import Said, Sink

End = Literal["stop", "cut"]
"""What ended an output: the model, or else a limit or a stop string."""
Found = TypeVar("Found")
Steps = Generator[None, None, Found]
Script = Callable[["TextSource", Sink], Steps[None]]
Say = Callable[[str], None]
_TRIM_ABOVE_CHARS = 4096
_MOST_REREAD = 8
_FREE_REREAD_CHARS = 1 << 16
"""Failed attempts may read the preceding characters this many times again, plus a fixed number.
"""


class TextSource:
    """Each method that is a generator waits for the text that it needs, or for the output's end."""

    def __init__(self) -> None:
        self.end: End | None = None
        self._text = ""
        self._at = 0
        self._num_dropped = 0  # number of characters dropped before the kept text
        # the last dropped texts, while the reader may return to a place in them
        self._dropped: list[str] = []
        self.num_reread = 0  # number of characters that were read without a result
        self._num_kept = 0  # number of places to which the reader may return
        self._settled = 0  # the reader may not return to any place before this one
        self.answer_at = 0  # number of characters before the answer: reasoning and its tags

    @property
    def holds(self) -> bool:
        """Whether text has arrived that has not been read."""
        return self._at < len(self._text) or self._num_kept > 0

    def add(self, text: str) -> None:
        """Adds text, in about the same time however much is held."""
        if self._at == len(self._text) or self._at > _TRIM_ABOVE_CHARS:
            if self._num_kept:
                self._dropped.append(self._text[: self._at])
            self._num_dropped += self._at
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def attempt(self, steps: Steps[bool]) -> Steps[bool]:
        """Tries the steps of a reader. If the steps find nothing, the position goes back to the
        start, unless they have called `settle`.

        After too many failed attempts, it tries no further steps and finds nothing, so that no
        output takes quadratic time.
        """
        place = self._keep()
        if self.num_reread > _MOST_REREAD * place + _FREE_REREAD_CHARS:
            steps = _nothing()
        found = yield from steps
        self._release(place, goes_back=not found)
        return found

    def comes(self, steps: Steps[bool]) -> Steps[bool]:
        """Returns whether the steps would find something, without reading."""
        place = self._keep()
        found = yield from steps
        self._release(place, goes_back=True)
        return found

    def settle(self) -> None:
        """Gives up all places to return to: what was read counts, even if the steps under way find
        nothing."""
        self._num_kept = 0
        self._dropped.clear()
        self._settled = self._num_dropped + self._at

    def begin_answer(self) -> None:
        """Marks all text read so far as reasoning."""
        self.answer_at = self._num_dropped + self._at

    def _keep(self) -> int:
        self._num_kept += 1
        return self._num_dropped + self._at

    def _release(self, place: int, goes_back: bool) -> None:
        self._num_kept = max(self._num_kept - 1, 0)
        if goes_back and place >= self._settled:
            self.num_reread += self._num_dropped + self._at - place
            dropped = "".join(self._dropped)
            self._text = dropped + self._text
            self._num_dropped -= len(dropped)
            self._dropped.clear()
            self._at = place - self._num_dropped
        if not self._num_kept:
            self._dropped.clear()

    def more(self) -> Steps[bool]:
        """Waits for more text. Returns False if no more text comes."""
        if self.end is not None:
            return False
        before = len(self._text) - self._at
        while len(self._text) - self._at == before and self.end is None:
            yield
        return len(self._text) - self._at > before

    def peek(self) -> Steps[str]:
        """Returns the next character, or "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def rest(self) -> str:
        """Reads and returns all text that has arrived and was not read."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def skip(self, characters: str) -> Steps[None]:
        """Reads and ignores these characters."""
        while (found := (yield from self.peek())) and found in characters:
            self._at += 1

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()).isspace():
            self._at += 1

    def run(self, character: re.Pattern[str], most: int) -> Steps[str]:
        """Reads characters that match, up to this number. Returns them."""
        found = ""
        while len(found) < most and character.match((yield from self.peek())):
            found += self._text[self._at]
            self._at += 1
        return found

    def take(self, *texts: str) -> Steps[str]:
        """Reads the first of these texts that comes next. Returns that text, or "" if none of them
        comes."""
        while True:
            text, at = self._text, self._at
            for wanted in texts:
                if text.startswith(wanted, at):
                    self._at = at + len(wanted)
                    return wanted
            rest = text[at : at + max(map(len, texts))]
            if not any(wanted.startswith(rest) for wanted in texts):
                return ""
            if not (yield from self.more()):
                return ""

    def until(self, marks: Marks, say: Say, in_call: bool = False) -> Steps[str]:
        """Passes on the text before the next mark. Returns that mark, or "" at the end.

        `in_call`: whether a possible part of a mark is dropped where a limit has cut the output.
        """
        while True:
            found = marks.search(self._text, self._at)
            if found is not None:
                before, self._at = self._text[self._at : found.start()], found.end()
                if before:
                    say(before)
                return found[0]
            holds = self.end is None or (in_call and self.end == "cut")
            cut = len(self._text) - (marks.overlap(self._text, self._at) if holds else 0)
            if cut > self._at:
                before, self._at = self._text[self._at : cut], cut
                say(before)
            if self.end is not None:
                if holds:
                    self._at = len(self._text)
                return ""
            yield

    def before(self, marks: Marks, most_chars: int) -> Steps[tuple[str, str] | None]:
        """Reads a text of at most this many characters, and the mark after it. Returns both.

        Returns None, and reads nothing, if there is no such mark.
        """
        while True:
            found = marks.search(self._text, self._at)
            if found is not None and found.start() - self._at <= most_chars:
                text, self._at = self._text[self._at : found.start()], found.end()
                return text, found[0]
            if found is not None or len(self._text) - self._at > most_chars + 64:
                return None
            if not (yield from self.more()):
                return None

    def unread(self, num_chars: int) -> None:
        """Goes back over the last characters that were read."""
        self._at -= num_chars

    def stretch(self, end: Callable[[str, int], int]) -> str:
        """Reads up to the place that `end(text, from)` returns. Returns the text that was read."""
        begin, self._at = self._at, end(self._text, self._at)
        return self._text[begin : self._at]


def _nothing() -> Steps[bool]:
    yield from ()
    return False


class OutputReader:
    """Reads one output by a script. `push` and `flush` return what is new since the last call."""

    def __init__(self, script: Script) -> None:
        self._source, self._sink = TextSource(), Sink()
        self._steps = script(self._source, self._sink)

    @property
    def holds(self) -> bool:
        """Whether some text is held back until more of it has arrived."""
        return self._source.holds or self._sink.holds

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._sink.is_in_call

    @property
    def answer_at(self) -> int:
        """Returns the number of characters before the answer, which are reasoning and its tags."""
        return self._source.answer_at

    def push(self, text: str) -> list[Said]:
        self._source.add(text)
        next(self._steps, None)
        return self._sink.take()

    def flush(self, cut: bool) -> list[Said]:
        """Returns the text that is left after the output has ended. `cut`: whether a limit or a
        stop string ended the output, not the model."""
        self._source.end = "cut" if cut else "stop"
        for _ in self._steps:
            pass
        self._sink.say(self._source.rest())
        self._sink.end()
        return self._sink.take()
