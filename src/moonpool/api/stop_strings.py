"""Finds stop strings across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, except for the part that may still become a stop string.

    `StopMatcher` runs one Knuth-Morris-Pratt automaton per stop string, so the cost of a character
    does not depend on the length of the strings.
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
        """Returns the text that is certainly part of the output. Sets `found` when a stop string is
        complete."""
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
        """Returns the text held back, after the output has ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advances every automaton by one character. Returns the longest stop string that ends at
        this character."""
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
    """Returns the length of the longest proper suffix of each prefix that begins `stop`."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)
