"""Why a request went where it went: kept as numbers, put into words only when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.types import InstanceId


class Candidate(NamedTuple):
    """An instance considered for a prefill, as it was predicted."""

    instance_id: InstanceId
    queue_s: float
    hit_tokens: int  # the fetch included
    fetch_from: InstanceId | None
    prefill_s: float
    ttft_s: float
    load_tokens: int = 0  # of the hit, from the instance's own SSD
    source_load_s: float = 0.0  # that the fetch's source should take to read from its SSD

    def __str__(self) -> str:
        how = f"fetches from {self.fetch_from}" if self.fetch_from else "computes the rest"
        ssd = f" ({self.load_tokens} of them on its SSD)" if self.load_tokens else ""
        return (
            f"{self.instance_id}: queue {self.queue_s:.3f} s, hit {self.hit_tokens} tokens{ssd},"
            f" {how},"
            f" prefill {self.prefill_s:.3f} s, TTFT {self.ttft_s:.3f} s"
        )


class Chosen(NamedTuple):
    """A placement: the best candidates, the chosen one first."""

    candidates: tuple[Candidate, ...]
    num_others: int
    prefill: InstanceId
    decode: InstanceId | None
    fetch_tokens: int
    tbt_s: float

    def lines(self) -> list[str]:
        told = [str(candidate) for candidate in self.candidates]
        if self.num_others:
            told.append(f"{self.num_others} other instances were considered")
        best = self.candidates[0]
        text = f"prefill on {self.prefill}"
        if self.decode is not None:
            text += f", decode on {self.decode}"
        if best.fetch_from is not None:
            text += f", fetching {self.fetch_tokens} tokens from {best.fetch_from}"
        told.append(f"{text}; predicted TTFT {best.ttft_s:.3f} s, TBT {self.tbt_s:.4f} s")
        return told


class Explanation:
    """What was decided about one request, and what befell it, in order."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: list[Chosen | str] = []

    def add(self, note: Chosen | str) -> None:
        self._notes.append(note)

    def lines(self) -> tuple[str, ...]:
        told: list[str] = []
        for note in self._notes:
            if isinstance(note, str):
                told.append(note)
            else:
                told += note.lines()
        return tuple(told)
