"""Sarathi-Serve's two workloads, drawn from the medians and P90s that it prints."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from papers.single_instance import SoloRequest

Quantiles = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SarathiServeWorkload:
    """Distributions of lengths as points (share of requests, tokens at most), joined by straight
    lines."""

    name: str
    prompt: Quantiles
    output: Quantiles
    max_tokens: int  # of both; longer requests are drawn again
    requests_per_s: float

    def draw(self, num_requests: int, seed: int) -> list[SoloRequest]:
        """Poisson arrivals."""
        rng = Random(seed)
        jobs: list[SoloRequest] = []
        at_s = 0.0
        while len(jobs) < num_requests:
            prompt, output = _at(self.prompt, rng.random()), _at(self.output, rng.random())
            if prompt + output <= self.max_tokens:
                at_s += rng.expovariate(self.requests_per_s)
                jobs.append(SoloRequest(at_s, prompt, output))
        return jobs


def _at(quantiles: Quantiles, share: float) -> int:
    for (low, fewer), (high, more) in itertools.pairwise(quantiles):
        if share <= high:
            return max(round(fewer + (more - fewer) * (share - low) / (high - low)), 1)
    raise AssertionError("quantiles end at 1")


CHAT = SarathiServeWorkload(
    name="chat",
    prompt=((0.0, 16), (0.5, 1730), (0.9, 5696), (1.0, 8000)),
    output=((0.0, 4), (0.5, 415), (0.9, 834), (1.0, 1024)),
    max_tokens=8192,
    requests_per_s=1.0,
)
ARXIV = SarathiServeWorkload(
    name="arxiv",
    prompt=((0.0, 256), (0.5, 7059), (0.9, 12985), (1.0, 16000)),
    output=((0.0, 16), (0.5, 208), (0.9, 371), (1.0, 1024)),
    max_tokens=16384,
    requests_per_s=0.5,
)
