"""Replaces simulations by a made-up cluster, whose attainment follows a formula, so that the right
result of a search is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from moonpool.config.tables import Config
from moonpool.plan.confidence import Attainment
from moonpool.plan.trial import Outcome, StopRequestedError, Trial

NUM_REQUESTS = 10_000
Truth = Callable[[Config], tuple[float, float]]
"""The formula's shares of requests that get their prefill and their decode in time."""


def outcome(prefill: float, decode: float) -> Outcome:
    prefill, decode = min(max(prefill, 0.0), 1.0), min(max(decode, 0.0), 1.0)
    late = round(NUM_REQUESTS * (1 - prefill))
    slow = round((NUM_REQUESTS - late) * (1 - decode))
    misses = {"prefill time": late, "decode speed": slow}
    return Outcome(
        Attainment(NUM_REQUESTS, NUM_REQUESTS - late - slow),
        {cause: number for cause, number in misses.items() if number},
        ((0, NUM_REQUESTS, late + slow),),
        ttft_p90_s=1.0,
    )


class MadeUpWorkforce:
    """Computes outcomes by the formula, and remembers its calls. The same trial has the same
    outcome."""

    def __init__(self, truth: Truth, noise: float = 0.0) -> None:
        self.num_run = 0
        self.asked: list[Trial] = []
        self._truth = truth
        self._noise = noise
        self._known: dict[Trial, Outcome] = {}

    def run(
        self,
        trials: Sequence[Trial],
        tell: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
        ahead: Sequence[Trial] = (),
    ) -> list[Outcome]:
        for trial in trials:
            if stop():
                raise StopRequestedError
            if trial not in self._known:
                self.asked.append(trial)
                self.num_run += 1
                prefill, decode = self._truth(trial.config)
                draw = Random(f"{trial.seed}").random() if trial.seed else 0.0
                prefill, decode = prefill / trial.speed, decode / trial.speed
                self._known[trial] = outcome(prefill - self._noise * draw, decode)
                tell(1)
        return [self._known[trial] for trial in trials]
