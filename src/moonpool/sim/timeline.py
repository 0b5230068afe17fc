"""Series over time, thinned as they grow: never more than so many samples, evenly spaced."""

from __future__ import annotations

MAX_SAMPLES = 1440


class Timeline:
    """Rows of named figures sampled every `interval_s`, which doubles when there are too many."""

    def __init__(self, names: tuple[str, ...], interval_s: float) -> None:
        assert interval_s > 0
        self.names = names
        self.interval_s = interval_s
        self.rows: list[tuple[float, ...]] = []

    def add(self, time_s: float, values: tuple[float, ...]) -> None:
        assert len(values) == len(self.names)
        self.rows.append((time_s, *values))
        if len(self.rows) > MAX_SAMPLES:
            self.rows = self.rows[::2]
            self.interval_s *= 2

    def series(self, name: str) -> list[tuple[float, float]]:
        column = self.names.index(name) + 1
        return [(row[0], row[column]) for row in self.rows]
