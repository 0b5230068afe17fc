"""Plants bugs in the code that measures silence. In these runs, processes are stopped for
seconds."""

from __future__ import annotations

from moonpool.link.silence import ListeningClock
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method


@plant("a head that stood still takes its instances for dead", ListeningClock, "tick")
def _counts_all(original: Method) -> Method:
    def defective(self: ListeningClock, now: float) -> float:
        self.listened_s += max(now - self._last_s, 0.0)
        self._last_s = now
        return 0.0

    return defective


@plant("a silent instance is never missed", ListeningClock, "tick")
def _counts_nothing(original: Method) -> Method:
    def defective(self: ListeningClock, now: float) -> float:
        before_s = self.listened_s
        missed_s = float(original(self, now))
        self.listened_s = before_s
        return missed_s

    return defective
