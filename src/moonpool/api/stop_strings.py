"""Stop strings, found across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through, holding back exactly what may still become a stop string.

    One Knuth-Morris-Pratt automaton per stop string, so that a character costs the same however
    long the strings are.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool):
        assert all(stops), "a stop string must not be empty"
        self.found: str | None = None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._failures = tuple(_failure_table(stop) for stop in stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be part of the answer. Sets `found` when a string ends."""
        assert self.found is None
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            stop = self._step(pending[index])
            if stop is not None:
                self.found = stop
                self._held = ""
                end = index + 1
                return pending[: end if self._include_stop else end - len(stop)]
        num_held = max(self._matched)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """What was held back when the answer ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advances every automaton by one character; the longest string that ends here, if any."""
        ended: str | None = None
        matched = self._matched
        for which, stop in enumerate(self._stops):
            length = matched[which]
            while length and stop[length] != character:
                length = self._failures[which][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                if ended is None or len(stop) > len(ended):
                    ended = stop
                length = 0
            matched[which] = length
        return ended


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper suffix that is a prefix of `stop`."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)
