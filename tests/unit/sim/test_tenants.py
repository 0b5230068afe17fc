"""Tests that a flood of one simulated tenant leaves the other tenant's TTFT unchanged."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.cost.model import Chunk
from moonpool.request_record import RequestRecord
from moonpool.scheduler.batching import contended_chunks
from moonpool.scheduler.batching.contended_chunks import WINDOW_S
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

BLOCK = 256


def arrivals(
    tenant: str, number: int, gap_s: float, num_tokens: int, **known: Any
) -> list[Arrival]:
    # differs by tenant, so that no prompt has a prefix of another's
    first = sum(tenant.encode()) * 10_000
    return [
        Arrival(
            n * gap_s, num_tokens, 20, private_keys(first + n, num_tokens, BLOCK), tenant, **known
        )
        for n in range(number)
    ]


def ttfts(
    requests: list[Arrival], chunk_tokens: int = 512, inline_chunks: bool = True
) -> dict[str, list[float]]:
    """Returns the seconds to the first token by tenant, in order of arrival. Asserts that no
    request is refused."""
    return _run(requests, chunk_tokens, inline_chunks)[0]


def _run(
    requests: list[Arrival], chunk_tokens: int, inline_chunks: bool = True
) -> tuple[dict[str, list[float]], float]:
    """Returns the same seconds, and the seconds of the last step of a prompt of 16,000 tokens
    alone."""
    found: dict[str, list[tuple[float, float]]] = {}

    def note(record: RequestRecord) -> None:
        assert record.ttft_s is not None
        found.setdefault(record.tenant, []).append((record.arrived_s, record.ttft_s))

    settings: dict[str, Any] = {
        "cluster": {"prefill": 1, "decode": 2},
        "conductor": {"admission": "none", "inline_chunks": inline_chunks},
        "engine": {"chunk_tokens": chunk_tokens},
    }
    config = parse_config("", settings, DEFAULTS)
    hardware = build_hardware(config)
    simulation = Simulation(config, hardware)
    simulation.run(sorted(requests, key=lambda arrival: arrival.arrived_s), note)
    assert sum(map(len, found.values())) == len(requests)
    chunk = Chunk(chunk_tokens, 16_000 - chunk_tokens, 0, True)
    step_s = hardware.prefill.ground_truth.step_s([chunk], 0, 0)
    return {name: [ttft for _, ttft in sorted(each)] for name, each in found.items()}, step_s


@pytest.mark.parametrize(
    ("chunk_tokens", "num_tokens"), [(512, 500), (512, 8000), (2048, 500), (2048, 1000)]
)
def test_a_flood_of_one_tenant_leaves_the_others_time_to_first_token(
    chunk_tokens: int, num_tokens: int
) -> None:
    """The first request is left out, because no tenant has been served before it, so both take
    turns."""
    small = arrivals("small", 30, 4.0, num_tokens)
    flood = arrivals("flood", 120, 0.5, 16_000)
    alone = mean(ttfts(small, chunk_tokens)["small"][1:])
    both = ttfts([*small, *flood], chunk_tokens)
    # Prompts of a flood take longer than the profile says, which the Conductor takes for a slow
    # machine at first (docs/decisions/cost-estimates.md): then short prompts go to the prefill
    # instance, too.
    assert mean(both["small"][1:]) < 1.3 * alone
    assert mean(both["flood"]) > 20 * alone, "the flood was no flood"


@pytest.mark.long
def test_chunks_are_short_only_while_another_tenant_would_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flood = arrivals("flood", 60, 0.5, 16_000)
    # The limit applies without the help of decode instances, which a tenant gets only if it is
    # alone.
    alone = max(ttfts(flood, 2048, inline_chunks=False)["flood"])
    assert max(ttfts(flood, 2048)["flood"]) < 0.6 * alone
    once = arrivals("small", 1, 1.0, 500)
    late = max(ttfts([*once, *flood], 2048, inline_chunks=False)["flood"])
    assert alone < late < alone + WINDOW_S
    # There are two floods. The steps of one are short compared with the prompts of the other.
    both = [*arrivals("large", 60, 0.5, 15_000), *flood]
    found = ttfts(both, 2048)
    monkeypatch.setattr(contended_chunks, "STEP_SHARE", 1e9)
    assert ttfts(both, 2048) == found
    assert max(ttfts([*once, *flood], 2048, inline_chunks=False)["flood"]) < late


@pytest.mark.parametrize(
    ("chunk_tokens", "num_tokens", "most_steps", "mean_steps", "ratio"),
    [
        (512, 2000, 1.1, 0.6, 1.2),
        (2048, 6000, 1.1, 0.6, 1.2),
        (2048, 2048, 0.5, 0.3, 1.2),
        (2048, 1000, 0.5, 0.2, 1.2),
    ],
)
def test_what_is_left_of_a_flood_is_a_short_step(
    chunk_tokens: int, num_tokens: int, most_steps: float, mean_steps: float, ratio: float
) -> None:
    """A prompt waits for the step under way, which is shorter if prompts are short. `step_s` is the
    time of a whole chunk. The first request does not count, because no tenant has been served
    before it, so both take turns."""
    small, flood = arrivals("small", 40, 3.7, num_tokens), arrivals("flood", 120, 0.5, 16_000)
    alone = ttfts(small, chunk_tokens)["small"][1:]
    both, step_s = _run([*small, *flood], chunk_tokens)
    extra = [late - early for late, early in zip(both["small"][1:], alone, strict=True)]
    assert max(extra) < most_steps * step_s
    assert mean(extra) < mean_steps * step_s
    assert mean(both["small"][1:]) < ratio * mean(alone)
    assert mean(both["flood"]) > 20 * mean(alone), "the flood was no flood"


def test_an_urgent_request_does_not_wait_for_prompts_of_its_own_tenant() -> None:
    urgent = arrivals("urgent", 30, 4.0, 2000)
    alone = mean(ttfts(urgent)["urgent"])
    flood = [replace(each, tenant="urgent", priority=7) for each in arrivals("f", 120, 0.5, 16_000)]
    both = ttfts([*urgent, *flood])["urgent"]
    assert len(both) == 150
    assert mean(sorted(both)[:30]) < 1.2 * alone
    assert mean(sorted(both)[30:]) > 20 * alone
