"""Tells reasoning from the answer: what a model writes between `<think>` and `</think>`.

Some chat templates end with `<think>`, so that the output begins within it. Text without tags is
the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.engine.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_LAST_TOKENS = 16
"""So many tokens of a prompt hold the tag at its end."""


class ReasoningReader:
    """Divides the text of one output as it arrives, in any pieces."""

    def __init__(self, begins_inside: bool) -> None:
        self._inside = begins_inside
        self._undecided = not begins_inside  # nothing but space, or a part of the tag, so far
        self._trims = True  # line breaks behind a tag belong to it
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Returns the new reasoning, and the new text of the answer."""
        self._held += text
        if self._undecided and not self._decide():
            return "", ""
        if not self._inside:
            return "", self._rest()
        before, tag, after = self._held.partition(CLOSE)
        if not tag:
            keep = overlap(self._held, CLOSE)
            self._held, kept = self._held[: len(self._held) - keep], self._held[-keep:]
            reasoning, self._held = self._rest(), kept if keep else ""
            return reasoning, ""
        self._held = before
        reasoning = self._rest()
        self._inside, self._trims, self._held = False, True, after
        return reasoning, self._rest()

    def flush(self) -> tuple[str, str]:
        """Returns what is left after the output has ended."""
        self._undecided = False
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)

    def _decide(self) -> bool:
        """Whether the output begins with the tag; False while that is open."""
        begins = self._held.lstrip()
        if begins.startswith(OPEN):
            self._inside, self._held = True, begins.removeprefix(OPEN)
        elif OPEN.startswith(begins):
            return False
        else:
            self._trims = False
        self._undecided = False
        return True

    def _rest(self) -> str:
        held, self._held = self._held, ""
        if self._trims:
            held = held.lstrip("\n")
            self._trims = not held
        return held


class ReasoningTags:
    """What one model's chat template and tokenizer make of the tags."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = CLOSE in (tokenizer.tool_template or "")
        # A tag may be a special token, which most answers leave out. The head encodes nothing.
        special = tokenizer.special_token_ids
        self._is_text = all(tokenizer.token_bytes(each) != CLOSE.encode() for each in special)

    def reader(self, prompt: Sequence[int], skips_special_tokens: bool) -> ReasoningReader | None:
        """Returns the reader of the answer to a prompt; None if the chat template knows no tags, or
        if the answer's text does not show them."""
        if not self._known or (skips_special_tokens and not self._is_text):
            return None
        end = self._tokenizer.decode(list(prompt[-_LAST_TOKENS:]), skip_special_tokens=False)
        return ReasoningReader(end.rstrip().endswith(OPEN))


def overlap(text: str, tag: str) -> int:
    """Returns how many of the last characters may begin the tag."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if tag.startswith(text[-n:])), 0)
