"""Compares an answer with the reference of its question, token by token.

A difference is a *near-tie* where the reference's logprobs say that another token was nearly as
likely: rounding explains the difference, and the text after it proves nothing. Any other difference
is one of
- missing: the answer continues after tokens that it left out,
- doubled: the answer continues after tokens that it gave twice,
- wrong: anything else.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moonpool_lab.trial.answer import Answer, TokenDetail

Kind = Literal["right", "near_tie", "wrong", "missing", "doubled", "unclear"]
RESYNC_TOKENS = 6
RESYNC_BYTES = 12
"""Number of bytes that must agree again after missing, doubled or replaced tokens; fewer could
agree by chance."""
MAX_SHIFT_TOKENS = 3
MAX_REPLACED_BYTES = 24


class AnswerDifference(msgspec.Struct):
    """The result of comparing an answer with its reference. `kind` is the kind of the first
    difference."""

    kind: Kind = "right"
    wrong_tokens: int = 0
    missing_tokens: int = 0
    doubled_tokens: int = 0
    at_token: int = 0


class Reference:
    """The reference answer of a question: its pieces and, if the server gives them, logprobs."""

    def __init__(self, answer: Answer, tie_nats: float) -> None:
        self.text = answer.text
        self.finish = answer.finish
        self._tie_nats = tie_nats
        pieces = [token.piece for token in answer.tokens]
        self.has_logprobs = bool(pieces) and b"".join(pieces) == answer.text.encode()
        self._tokens: list[TokenDetail] = answer.tokens if self.has_logprobs else []
        self.pieces = pieces if self.has_logprobs else _split(answer.text)
        self._suffixes = [b"".join(self.pieces[at:]) for at in range(len(self.pieces) + 1)]

    def compare(self, answer: Answer) -> AnswerDifference:
        """Compares the text of a whole answer. Without logprobs, any difference other than missing
        or doubled tokens is `unclear`."""
        found = AnswerDifference()
        if answer.text == self.text:
            return found
        text = answer.text.encode()
        position = at = 0
        while at < len(self.pieces):
            if text.startswith(self.pieces[at], position):
                position += len(self.pieces[at])
                at += 1
                continue
            rest = text[position:]
            if self._is_near_tie(at, rest, answer.finish):
                self._note(found, "near_tie", at, 0)
                return found
            step = self._resync(at, rest, answer.finish)
            if step is None:
                kind: Kind = "wrong" if self.has_logprobs else "unclear"
                self._note(found, kind, at, len(self.pieces) - at)
                return found
            kind, num_tokens, num_bytes = step
            self._note(found, kind, at, num_tokens)
            at += 0 if kind == "doubled" else num_tokens
            position += num_bytes
        if position < len(text) and found.kind == "right":
            self._note_longer(found, text[position:])
        return found

    def _note_longer(self, found: AnswerDifference, rest: bytes) -> None:
        """Notes that the answer continues after the end of the reference."""
        # The reference ended by a token whose alternatives are unknown.
        if self.finish != "length":
            self._note(found, "near_tie" if self.has_logprobs else "unclear", len(self.pieces), 0)
        else:
            self._note(
                found,
                "doubled",
                len(self.pieces),
                max(1, len(_split(rest.decode(errors="replace")))),
            )

    @staticmethod
    def _note(found: AnswerDifference, kind: Kind, at: int, num_tokens: int) -> None:
        if found.kind == "right":
            found.kind, found.at_token = kind, at
        if kind == "wrong":
            found.wrong_tokens += num_tokens
        elif kind == "missing":
            found.missing_tokens += num_tokens
        elif kind == "doubled":
            found.doubled_tokens += num_tokens

    def _is_near_tie(self, at: int, rest: bytes, finish: str) -> bool:
        """Whether the answer's token at this place was nearly as likely as the reference's
        token."""
        if not self._tokens:
            return False
        token = self._tokens[at]
        others = {p: v for p, v in token.alternatives.items() if p != token.piece}
        if rest:
            fitting = [v for p, v in others.items() if p and rest.startswith(p)]
        elif finish == "length":
            return False  # the answer has used up its tokens, so some are not in its text
        else:  # the token that ends an answer is shown as nothing or in angle brackets
            fitting = [v for p, v in others.items() if not p or p.startswith(b"<")]
        unlisted = min(token.alternatives.values(), default=token.logprob)
        likeliest = max(fitting, default=unlisted)
        return token.logprob - likeliest < self._tie_nats

    def _resync(self, at: int, rest: bytes, finish: str) -> tuple[Kind, int, int] | None:
        """Returns (kind, number of tokens, bytes of `rest` to skip) if the answer agrees with the
        reference again after tokens that are missing, doubled or wrong, else None."""
        if not rest:
            return ("missing", len(self.pieces) - at, 0) if finish == self.finish else None
        for shift in range(1, MAX_SHIFT_TOKENS + 1):
            if self._goes_on(rest, at + shift):
                return "missing", shift, 0
        for shift in range(1, min(at, MAX_SHIFT_TOKENS) + 1):
            twice = b"".join(self.pieces[at - shift : at])
            if rest.startswith(twice) and self._goes_on(rest[len(twice) :], at):
                return "doubled", shift, len(twice)
        if self._tokens:
            for num_bytes in range(1, min(len(rest), MAX_REPLACED_BYTES) + 1):
                if self._goes_on(rest[num_bytes:], at + 1):
                    return "wrong", 1, num_bytes
        return None

    def _goes_on(self, rest: bytes, at: int) -> bool:
        """Whether `rest` agrees with the reference from token `at` on, for long enough."""
        if at >= len(self.pieces) or not rest:
            return False
        enough = b"".join(self.pieces[at : at + RESYNC_TOKENS])
        expected = self._suffixes[at][: max(len(enough), RESYNC_BYTES)]
        if len(expected) >= RESYNC_BYTES:
            return rest.startswith(expected)
        return rest == expected or (len(rest) >= RESYNC_BYTES // 2 and rest.startswith(expected))


def _split(text: str) -> list[bytes]:
    """Splits a text into words with the preceding space, which stand for tokens if the server
    returns no tokens."""
    pieces = text.replace(" ", "\0 ").split("\0")
    return [piece.encode() for piece in pieces if piece]
