"""The answered turns of one cluster in the demo, and their sums."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from moonpool_lab.demo.client import ClientResponse


@dataclass(slots=True)
class AnsweredTurn:
    """The answer to one turn of one user."""

    turn: int
    user: str
    what: str
    answer: ClientResponse
    right: bool
    explained: dict[str, Any]

    @property
    def tbt_s(self) -> float:
        """Mean gap between tokens as they left the decode instance.

        The client cannot measure this gap, because the server holds back the text of a token that
        may begin the stop string.
        """
        return float(self.explained["observed"]["tpot_s"] or 0.0)

    @property
    def cells(self) -> tuple[str, ...]:
        """The turn as a row of the table with the header `COLUMNS`."""
        answer, explained = self.answer, self.explained
        return (
            str(self.turn),
            self.user,
            self.what,
            "yes" if self.right else "NO",
            f"{1e3 * answer.ttft_s:,.1f}",
            f"{1e3 * self.tbt_s:.2f}",
            f"{answer.prompt_tokens:,}",
            f"{answer.cached_tokens:,}",
            f"{explained['fetched_tokens']:,}",
            f"{explained['loaded_tokens']:,}",
            str(explained["prefill_instance"]),
            str(explained["decode_instance"]),
        )


COLUMNS = (
    *("turn", "user", "asked", "right", "TTFT ms", "TBT ms", "prompt", "cached", "fetched"),
    *("SSD", "prefill on", "decode on"),
)
TEXTS = ("user", "asked", "right", "prefill on", "decode on")
"""The columns that are not numbers."""


@dataclass(slots=True)
class Event:
    """An event that the demo caused, and how it went."""

    title: str
    text: str


@dataclass(slots=True)
class DemoRun:
    """All turns of one cluster, and the times that they took."""

    cached: bool
    start_s: float = 0.0
    # seconds of each turn until the last user had an answer
    turns_s: list[float] = field(default_factory=list)
    rows: list[AnsweredTurn] = field(default_factory=list)
    after: list[AnsweredTurn] = field(default_factory=list)  # turns after the events
    events: list[Event] = field(default_factory=list)

    def last(self, num_turns: int) -> DemoRun:
        """The last turns of the cluster, without the events."""
        before = max((row.turn for row in self.rows), default=0) - num_turns
        rows = [row for row in self.rows if row.turn > before]
        return DemoRun(self.cached, self.start_s, self.turns_s[-num_turns:], rows)

    @property
    def wall_s(self) -> float:
        """How long all turns took, without the events."""
        return sum(self.turns_s)

    @property
    def wrong(self) -> list[AnsweredTurn]:
        return [row for row in self.rows + self.after if not row.right]

    @property
    def prompt_tokens(self) -> int:
        return sum(row.answer.prompt_tokens for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.answer.cached_tokens for row in self.rows)

    @property
    def fetched_tokens(self) -> int:
        """Tokens that came from another instance, including those of the events."""
        return sum(row.explained["fetched_tokens"] for row in self.rows + self.after)

    @property
    def loaded_tokens(self) -> int:
        """Tokens that came from an SSD, including those of the events."""
        return sum(row.explained["loaded_tokens"] for row in self.rows + self.after)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(row.answer.ttft_s for row in self.rows)

    @property
    def mean_tbt_s(self) -> float:
        return statistics.fmean(row.tbt_s for row in self.rows)

    def mean_stage_s(self, stage: str) -> float:
        return statistics.fmean(row.explained["stages_s"].get(stage, 0.0) for row in self.rows)
