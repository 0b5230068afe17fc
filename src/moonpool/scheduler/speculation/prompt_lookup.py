"""Finds the newest tokens of a request earlier in its own text, and returns what followed there."""

from __future__ import annotations

from moonpool.types import Tokens

READ_TOKENS = 4096
"""Most tokens that one call reads, so that a long prompt delays no step by much."""
REMEMBERED_TOKENS = 65_536
"""The text before its last this many tokens is not read; it bounds memory."""
MAX_PLACES = 16
"""Most earlier places that one call compares."""


class PromptLookup:
    """The index over one request's prompt and answer: where each run of `least` tokens ended.

    `draft` reads the tokens that are new since the last call, so the text must only grow.
    """

    def __init__(self, least: int, most: int) -> None:
        """An earlier place counts if its last `least` tokens equal the newest ones. Of several
        places, chooses the one with the longest match, up to `most` tokens, and of equally long
        matches the newest."""
        assert 0 < least <= most
        self._least, self._most = least, most
        self._begin = -1  # position of the first token read; -1 means that none was
        self._read = 0  # all runs that end before this position have been noted
        self._newest_end: dict[tuple[int, ...], int] = {}
        # maps the end of a run to the end of the preceding equal run
        self._end_before: dict[int, int] = {}

    def draft(self, tokens: Tokens, num_tokens: int) -> tuple[int, ...]:
        """Returns up to `num_tokens` tokens that may follow the text, or () if nothing is found."""
        self._index(tokens)
        size = tokens.size
        if self._read < size or num_tokens < 1:
            return ()
        end = self._best_end(tokens)
        if end is None:
            return ()
        found = list(tokens.between(end, min(end + num_tokens, size)))
        period = size - end
        # the text repeats itself, so the draft continues from its own beginning
        while len(found) < num_tokens:
            found.append(found[-period])
        return tuple(found)

    def _index(self, tokens: Tokens) -> None:
        """Adds the runs that end before the last token to the index, because only these have a
        continuation."""
        if self._begin < 0:
            self._begin = max(0, tokens.size - REMEMBERED_TOKENS)
            self._read = self._begin + self._least
        stop = min(tokens.size, self._read + READ_TOKENS)
        if stop <= self._read:
            return
        first = self._read - self._least
        text = tokens.between(first, stop)
        for end in range(self._read, stop):
            run = tuple(text[end - first - self._least : end - first])
            before = self._newest_end.get(run)
            if before is not None:
                self._end_before[end] = before
            self._newest_end[run] = end
        self._read = stop

    def _best_end(self, tokens: Tokens) -> int | None:
        newest = tokens.between(max(self._begin, tokens.size - self._most), tokens.size)
        end = self._newest_end.get(tuple(newest[-self._least :]))
        best, best_length = end, 0
        for _ in range(MAX_PLACES):
            if end is None or best_length == len(newest):
                break
            length = self._least
            while length < len(newest) and end - length > self._begin:
                if tokens[end - length - 1] != newest[-length - 1]:
                    break
                length += 1
            if length > best_length:
                best, best_length = end, length
            end = self._end_before.get(end)
        return best
