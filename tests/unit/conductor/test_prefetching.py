"""Tests when a session's next turn is expected, and what is prefetched for it."""

from __future__ import annotations

from random import Random

import pytest
from conductor_desk import Desk, of

from moonpool.conductor.actions import ConductorAction, Send, Tick
from moonpool.conductor.forecast.turn_forecast import AGE_LIMITS_S, TurnForecast, session_class
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import (
    BlocksChanged,
    BlocksSnapshot,
    PrefetchBlocks,
    PrefillStarted,
    StartPrefill,
)
from moonpool.types import BlockKey, FinishReason

OF = session_class(1, None)


def teach(forecast: TurnForecast, pauses_s: list[float | None]) -> None:
    """Teaches the times between turns; None means that the session never continues."""
    for pause_s in pauses_s:
        for number, limit_s in enumerate(AGE_LIMITS_S):
            if pause_s is not None and pause_s < limit_s:
                forecast.note_returned(OF, pause_s)
                break
            forecast.note_passed(OF, number)


def test_the_rate_peaks_where_turns_come() -> None:
    forecast = TurnForecast()
    rng = Random(1)
    teach(forecast, [rng.uniform(95.0, 120.0) for _ in range(400)])
    assert forecast.rate_per_s(OF, 100.0) > 10 * forecast.rate_per_s(OF, 30.0)
    assert forecast.chance(OF, 91.0, 37.0) > 0.9
    assert forecast.chance(OF, 10.0, 30.0) < 0.1


def test_sessions_that_end_lower_the_chance() -> None:
    forecast = TurnForecast()
    teach(forecast, [100.0, None] * 300)
    assert forecast.chance(OF, 91.0, 37.0) == pytest.approx(0.5, abs=0.05)


def test_a_class_without_history_has_the_curve_of_all() -> None:
    forecast = TurnForecast()
    teach(forecast, [100.0] * 300)
    assert forecast.chance(session_class(3, 20.0), 91.0, 37.0) > 0.8


class Sessions:
    """Runs a Conductor with one mixed instance; each session has a turn every 100 s."""

    def __init__(self, **config: object) -> None:
        self.desk = Desk("m", **config)
        self.desk.report("m", BlocksSnapshot(next_sequence=0, keys=()))
        self.sequence = 0
        self.prefetched: dict[int, list[float]] = {}
        self.keys_of: dict[int, list[BlockKey]] = {}

    def turn(self, number: int, turn: int) -> None:
        tokens = tuple(range(1000 * number, 1000 * number + 12 + 8 * turn))
        desk = self.desk
        layout = next(iter(desk.conductor.instances.values())).info.layout
        keys = block_keys(tokens, layout.block_tokens, root_key(layout.fingerprint, ""))
        self.keys_of[number] = keys
        name = f"s{number}t{turn}"
        starts = of(desk.ask(name, token_ids=tokens, max_tokens=1), Send)
        (start,) = [one.command for one in starts if isinstance(one.command, StartPrefill)]
        attempt_id = start.attempt.attempt_id
        desk.report("m", PrefillStarted(attempt_id, cached_tokens=0, fetched_tokens=0))
        desk.tokens("m", 50, finish=FinishReason.LENGTH, work=attempt_id)
        self.change(stored=tuple(keys))

    def change(self, **changes: tuple[BlockKey, ...]) -> None:
        self.desk.report("m", BlocksChanged(sequence=self.sequence, **changes))
        self.sequence += 1

    def run(self, num_sessions: int = 30, num_turns: int = 8) -> None:
        """Runs the sessions, which start one after another; their blocks are demoted after 20 s."""
        plan = [
            (100.0 * turn + 3.0 * number, number, turn)
            for number in range(num_sessions)
            for turn in range(num_turns)
        ]
        demotions: list[tuple[float, int]] = []
        for at_s, number, turn in sorted(plan):
            while self.desk.now + 1 <= at_s:
                self.desk.now += 1
                while demotions and demotions[0][0] <= self.desk.now:
                    self.change(demoted=tuple(self.keys_of[demotions.pop(0)[1]]))
                self.note(self.desk.handle(Tick()))
            self.turn(number, turn)
            demotions.append((self.desk.now + 20, number))

    def note(self, actions: list[ConductorAction]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.command, PrefetchBlocks):
                numbers = [n for n, k in self.keys_of.items() if tuple(k) == action.command.keys]
                self.prefetched.setdefault(numbers[0], []).append(self.desk.now)


@pytest.mark.long
def test_sessions_are_prefetched_shortly_before_their_turn() -> None:
    sessions = Sessions()
    sessions.run()
    assert len(sessions.prefetched) > 20
    for number, times in sessions.prefetched.items():
        for at_s in times:
            due_s = (at_s - 3.0 * number) % 100.0
            assert 60.0 < due_s < 100.0, "after it was demoted, and before its turn"


def test_prefetching_can_be_switched_off() -> None:
    sessions = Sessions(prefetch=False)
    sessions.run(num_turns=5)
    assert not sessions.prefetched
