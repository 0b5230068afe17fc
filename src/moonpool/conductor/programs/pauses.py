"""How long programs pause between two calls, by program, kind and tool.

A program pauses from the end of an answer until its next call arrives: its tool runs, or a person
thinks. The curves are those of sessions (`conductor.forecast.turn_forecast`). The class of a pause
follows from the kind of its program, the tool if the client names one, the number of calls so far,
and the length of the program's last pause. A pause that lasts longer than all ranges of ages counts
as the program's end.
"""

from __future__ import annotations

from moonpool.conductor.forecast.turn_forecast import (
    AGE_LIMITS_S,
    SessionClass,
    TurnForecast,
    session_class,
)
from moonpool.conductor.programs.program import Program

MAX_CLASSES = 4096
"""Kinds and tools that are told apart; further ones share their classes."""


class Pauses:
    """Learns from pauses that end, and from the ages that other pauses reach."""

    def __init__(self) -> None:
        self.forecast = TurnForecast()
        self._named: dict[tuple[str, str], int] = {}

    def begin(self, program: Program, tool: str, now: float) -> None:
        """Notes that the program's last call has ended."""
        program.since_s, program.num_ranges = now, 0
        name = (program.kind, tool)
        number = self._named.get(name)
        if number is None:
            number = len(self._named) + 1 if len(self._named) < MAX_CLASSES else 0
            if number:
                self._named[name] = number
        program.pause_class = self._class_of(program, number)

    def _class_of(self, program: Program, number: int) -> SessionClass:
        num_turns, pause = session_class(program.num_calls, program.pause_s)
        return number * 8 + num_turns, pause

    def end(self, program: Program, now: float) -> None:
        """Notes that the program's next call has arrived."""
        if program.since_s is None:
            return
        self.age(program, now)
        program.pause_s = now - program.since_s
        self.forecast.note_returned(program.pause_class, program.pause_s)
        program.since_s = None

    def age(self, program: Program, now: float) -> bool:
        """Notes the ages that the pause has reached. Returns whether it exceeds all ranges."""
        assert program.since_s is not None
        age_s = now - program.since_s
        limits = AGE_LIMITS_S
        while program.num_ranges < len(limits) and limits[program.num_ranges] <= age_s:
            self.forecast.note_passed(program.pause_class, program.num_ranges)
            program.num_ranges += 1
        return program.num_ranges == len(limits)

    def chance(self, program: Program, within_s: float, now: float) -> float:
        """Returns the probability that the program's next call comes within this time."""
        if program.since_s is None:
            return 1.0
        return self.forecast.chance(program.pause_class, now - program.since_s, within_s)
