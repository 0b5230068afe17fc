"""What happened to the cluster recently, for the live page: joined, lost, drained, refused,
damaged.

No other part reports these events. The head's tick compares what the Conductors know now with what
they knew a second ago, so no other part has to think of the page. The list of events is short and
bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.conductor.conductor import Conductor
from moonpool.conductor.state import InstanceState
from moonpool.head.watch.live_history import ANSWERED
from moonpool.refusal import reason_words
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId

MAX_EVENTS = 100
LOOK_S = 1.0
REFUSALS_S = 10.0
"""Refused requests within this time are shown as one event."""
FAULTS = {"lost", "damaged", "refused", "disk"}
"""Kinds of events that the page shows as faults."""


@dataclass(frozen=True, slots=True)
class LiveEvent:
    at_s: float
    kind: str
    text: str
    """What the page writes after the kind of event, so it does not repeat the kind."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of an instance at the last check."""

    role: str
    draining: str
    damaged: int
    disk_error: str


class LiveEvents:
    """The events of one head, the newest last."""

    def __init__(self, conductors: Sequence[Conductor]) -> None:
        """`conductors`: one for each model; the list may grow."""
        self._conductors = conductors
        self._events: deque[LiveEvent] = deque(maxlen=MAX_EVENTS)
        self._seen: dict[InstanceId, _Seen] = {}
        self._looked_s = float("-inf")
        self._refused: Counter[str] = Counter()
        self._refused_s = 0.0

    def note(self, kind: str, text: str, now: float) -> None:
        self._events.append(LiveEvent(now, kind, text))

    def request_ended(self, record: RequestRecord, now: float) -> None:
        if record.outcome in ANSWERED or record.outcome == FinishReason.ABORT.value:
            return  # an answer, or a client that leaves, is not a fault
        if not self._refused:
            self._refused_s = now
        self._refused[record.outcome] += 1

    def tick(self, now: float) -> None:
        """Checks at most once a second."""
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if self._refused and now - self._refused_s >= REFUSALS_S:
            self._note_refused(now)
        states = {
            name: state for each in self._conductors for name, state in each.instances.items()
        }
        present = {name: _seen(state) for name, state in states.items()}
        if present != self._seen:
            self._compare(present, now)
            self._seen = present

    def describe(self, now: float) -> list[dict[str, Any]]:
        """Returns the events, the newest first."""
        listed = list(self._events)
        if self._refused:
            listed.append(LiveEvent(self._refused_s, "refused", self._refusals()))
        return [
            {
                "s_ago": round(max(now - each.at_s, 0.0), 1),
                "kind": each.kind,
                "text": each.text,
                "fault": each.kind in FAULTS,
            }
            for each in reversed(listed)
        ]

    def _note_refused(self, now: float) -> None:
        self.note("refused", self._refusals(), self._refused_s)
        self._refused.clear()

    def _refusals(self) -> str:
        total = sum(self._refused.values())
        each = ", ".join(
            f"{count} {reason_words(why)}" for why, count in self._refused.most_common(4)
        )
        return f"{total} {'request' if total == 1 else 'requests'} without an answer: {each}"

    def _compare(self, present: Mapping[InstanceId, _Seen], now: float) -> None:
        for name, then in self._seen.items():
            if name not in present:
                if then.draining:
                    self.note("left", f"{name}: {then.draining}", now)
                else:
                    self.note("lost", f"{name}; its requests go on elsewhere", now)
        for name, seen in present.items():
            before = self._seen.get(name)
            if before is None:
                self.note("joined", f"{name} as {seen.role}", now)
                continue
            if seen.role != before.role:
                self.note("role", f"{name} was {before.role} and is {seen.role} now", now)
            if seen.draining and not before.draining:
                self.note("draining", f"{name}: {seen.draining}", now)
            if seen.damaged > before.damaged:
                number = seen.damaged - before.damaged
                text = f"{number} damaged slices were found at {name}, and are computed again"
                self.note("damaged", text, now)
            if seen.disk_error and seen.disk_error != before.disk_error:
                self.note("disk", f"the SSD of {name}: {seen.disk_error}", now)


def _seen(state: InstanceState) -> _Seen:
    load = state.load
    counters = {} if load is None else load.counters
    damaged = counters.get("corrupt_slices", 0) + counters.get("ssd_damaged_blocks", 0)
    error = "" if load is None or load.ssd is None else load.ssd.error
    draining = "" if state.drain is None else state.drain.reason or "it was told to"
    return _Seen(state.role.value, draining, int(damaged), error or "")
