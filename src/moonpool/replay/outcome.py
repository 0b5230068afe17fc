"""A replay's figures, under the names of `simulate --json`; what only the server could know comes
from its counters, where it is a moonpool."""

from __future__ import annotations

import resource
from typing import Any

from moonpool.replay.player import Player
from moonpool.replay.server import ServerFacts
from moonpool.sim.histogram import rounded
from moonpool.sim.outcome import request_figures

Counters = dict[str, float]


def summarise(
    player: Player,
    facts: ServerFacts,
    before: Counters,
    after: Counters,
    spent: tuple[float, float],
    seed: int,
) -> dict[str, Any]:
    """`spent`: seconds of wall clock and of this process's CPU."""
    wall_s, cpu_s = spent
    replayed_s = max(player.last_end_s, 1e-9)
    found = player.collector
    figures = request_figures(found, player.last_arrival_s or replayed_s)
    figures |= {
        "unfinished": player.num_unfinished,
        "interrupted": player.interrupted,
        "errors": dict(player.errors.most_common(8)),
        "resent": player.num_resent,
        "simulated_s": rounded(replayed_s, 9),
        "wall_s": round(wall_s, 3),
        "seed": seed,
        "model": facts.model,
        "config": facts.config or {},
        "client": {
            "late_s": player.late_s.summary() | {"max": rounded(player.late_s.largest)},
            "delayed": player.num_delayed,
            "peak_in_flight": player.peak_in_flight,
            "cpu_s": rounded(cpu_s),
            "cpu_us_per_token": rounded(1e6 * cpu_s / max(found.output_tokens, 1)),
        },
    }
    if facts.config is not None:
        _add_server(figures, _since(before, after), after, facts, replayed_s)
    return figures


def cpu_s() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _since(before: Counters, after: Counters) -> Counters:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _named(counters: Counters, name: str) -> dict[str, float]:
    """By label."""
    start = name + "{"
    return {key[len(start) : -1]: v for key, v in counters.items() if key.startswith(start)}


def _add_server(
    figures: dict[str, Any], new: Counters, after: Counters, facts: ServerFacts, replayed_s: float
) -> None:
    """Replaces what a client cannot see by what the server counted meanwhile (mutates)."""
    figures["wasted_prefill_s"] = rounded(new.get("moonpool:wasted_prefill_seconds_total", 0.0))
    figures["wasted_prefills"] = int(new.get("moonpool:wasted_prefills_total", 0))
    figures["prefill_s"] = rounded(new.get("moonpool:prefill_seconds_total", 0.0))
    figures["cache"]["fetched_tokens"] = int(new.get("moonpool:fetched_tokens_total", 0))
    moved = _named(new, "moonpool:transfer_bytes_total")
    figures["transfer"] = {
        "bytes": int(sum(moved.values())),
        "seconds": rounded(new.get("moonpool:transfer_seconds_total", 0.0)),
        "by_transport": moved,
    }
    instances = _named(after, "moonpool:instances")
    figures["utilisation"] = {
        role: rounded(seconds / (instances[role] * replayed_s))
        for role, seconds in sorted(_named(new, "moonpool:step_seconds_total").items())
        if instances.get(role)
    }
    rejected = _named(new, "moonpool:requests_rejected_total")
    figures["server"] = {
        "rejected_by_reason": {name: int(n) for name, n in sorted(rejected.items()) if n},
        "failed_by_reason": {
            name: int(n)
            for name, n in sorted(_named(new, "moonpool:requests_failed_total").items())
            if n
        },
        "ttft_s": {"mean": _mean(new, "vllm:time_to_first_token_seconds")},
        "tbt_s": {"mean": _mean(new, "vllm:inter_token_latency_seconds")},
    }
    errors = _mean(new, "moonpool:predicted_ttft_error_seconds")
    if errors:
        figures["predicted_ttft_error_s"]["mean_absolute"] = errors


def _mean(new: Counters, name: str) -> float:
    return rounded(new.get(f"{name}_sum", 0.0) / max(new.get(f"{name}_count", 0.0), 1.0))
