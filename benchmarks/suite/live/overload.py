"""Admission policies on a live local cluster under overload, each beside its simulation (Mooncake
v3 section 7).

SLOs are set as in the paper, from a first run without load: ten times the P90 of TTFT, five times
the P90 of TBT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.suite.live.agreement import (
    UNLOADED_REQUESTS,
    AgreementPair,
    measure_local,
    replay_rows,
    run_both,
    simulated_slo,
)
from moonpool.config.tables import Admission
from moonpool.types import Slo, Struct
from moonpool_lab.demo.local_server import LocalServer
from moonpool_lab.profiling.live_cluster import (
    LiveCluster,
    LiveWorkload,
    estimate_capacity,
    unloaded_slo,
)

UNLOADED_SHARE = 0.1
"""A share of capacity: at this rate requests hardly overlap."""
SIMULATED_S = 120.0
FILLING_SHARE = 0.15
"""A share of the time in which requests come. The pools fill during this share, so no swing is
counted in it."""
Say = Callable[[str], None]
Series = Sequence[float]


class Oscillation(Struct, frozen=True):
    """How the decode load swings over a run: its standard deviation, and its correlation with the
    prefill load. Returns None if there are too few samples, or if one of the two
    never changed."""

    decode_mean: float
    decode_deviation: float
    prefill_correlation: float | None


def bench_overload(
    cluster: LiveCluster,
    workload: LiveWorkload,
    admissions: Sequence[Admission],
    loads: Sequence[float],
    seconds: float,
    say: Say,
    slo_ttft_s: float | None = None,
    slo_tbt_s: float | None = None,
) -> dict[str, Any]:
    """Figures by admission and load; SLOs that are not given are the paper's. Raises what server
    and replay raise."""
    with LocalServer(cluster.with_(admission="none").arguments()) as server:
        profile = measure_local(server, workload, say)
        if slo_ttft_s and slo_tbt_s:
            slo = Slo(ttft_s=slo_ttft_s, tbt_s=slo_tbt_s)
        else:
            usual = simulated_slo(cluster, profile, workload)
            usual_rps = estimate_capacity(cluster, profile, workload, SIMULATED_S, usual)
            slo = measure_unloaded(server.url, workload, UNLOADED_SHARE * usual_rps)
            slo = Slo(ttft_s=slo_ttft_s or slo.ttft_s, tbt_s=slo_tbt_s or slo.tbt_s)
    capacity_rps = estimate_capacity(cluster, profile, workload, SIMULATED_S, slo)
    say(
        f"SLOs: TTFT {slo.ttft_s:.3g} s, TBT {1e3 * slo.tbt_s:.3g} ms (10 and 5 times the unloaded"
        f" P90 unless given); capacity about {capacity_rps:.3g} requests/s (simulated)"
    )
    say(_HEADER)
    runs: dict[str, dict[str, Any]] = {}
    for admission in admissions:
        chosen = cluster.with_(admission=admission, slo=slo)
        runs[admission] = {}
        for load in loads:
            rows = workload.rows(load * capacity_rps, seconds)
            both = run_both(chosen, profile, rows, workload.block_tokens)
            found = _figures(both, rows[-1].arrived_s)
            runs[admission][f"{load:g}"] = found
            for line in _lines(admission, load, found):
                say(line)
    verdicts = {name: _verdict(found) for name, found in runs.items()}
    for name, verdict in verdicts.items():
        say(_words(name, verdict))
    swing = _swing(verdicts)
    if swing:
        say(
            f"with prediction the decode load swings {swing['live']:.2f} times as much as with"
            f" early rejection ({swing['simulated']:.2f} simulated)"
        )
    return {
        "cluster": msgspec.to_builtins(cluster),
        "slo": msgspec.to_builtins(slo),
        "capacity_rps": capacity_rps,
        "profile": msgspec.to_builtins(profile),
        "runs": runs,
        "verdicts": verdicts,
        "swing_of_early": swing,
    }


def measure_unloaded(
    url: str,
    workload: LiveWorkload,
    rate_rps: float,
    vocab_size: int | None = None,
    model: str | None = None,
    *,
    api_key: str = "",
    ca_file: str = "",
) -> Slo:
    """Returns the paper's SLOs, measured with requests that hardly overlap."""
    rows = workload.with_(burst=1.0).rows(rate_rps, UNLOADED_REQUESTS / rate_rps)
    figures = replay_rows(
        url,
        rows,
        workload.block_tokens,
        None,
        vocab_size,
        model,
        seed=99,
        api_key=api_key,
        ca_file=ca_file,
    )
    return unloaded_slo(figures)


def oscillation(prefill: Series, decode: Series) -> Oscillation:
    """Returns the oscillation of samples taken at the same instants."""
    if not decode:
        return Oscillation(0.0, 0.0, None)
    mean = fmean(decode)
    deviation = sqrt(fmean([(x - mean) ** 2 for x in decode]))
    return Oscillation(mean, deviation, _correlation(prefill, decode))


def _correlation(one: Series, other: Series) -> float | None:
    if len(one) < 3:
        return None
    a, b = fmean(one), fmean(other)
    spread = sqrt(sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in other))
    if spread <= 0:
        return None
    return sum((x - a) * (y - b) for x, y in zip(one, other, strict=True)) / spread


def _figures(both: AgreementPair, until_s: float) -> dict[str, Any]:
    live, simulated = both.live, both.simulated
    within = [s for s in both.samples if s.at_s <= live["simulated_s"]]
    steady = [s for s in within if FILLING_SHARE * until_s <= s.at_s <= until_s]
    timeline = both.simulation.timeline
    series = {
        name: [v for at_s, v in timeline.series(name) if FILLING_SHARE * until_s <= at_s <= until_s]
        for name in ("prefill_load", "decode_load")
    }
    return {
        "live": _summary(live)
        | {
            "oscillation": msgspec.to_builtins(
                oscillation([s.prefill_load for s in steady], [s.decode_load for s in steady])
            ),
            "peak_waiting": max((s.waiting for s in within), default=0),
            "peak_running": max((s.running for s in within), default=0),
            "peak_head_mib": max((s.head_bytes for s in within), default=0) >> 20,
            "peak_worker_mib": max((s.worker_bytes for s in within), default=0) >> 20,
        },
        "simulated": _summary(simulated)
        | {
            "oscillation": msgspec.to_builtins(
                oscillation(series["prefill_load"], series["decode_load"])
            ),
            "peak_waiting": max((v for _, v in timeline.series("prefill_queued")), default=0),
        },
        "samples": msgspec.to_builtins(within),
        "all": {"live": live, "simulated": simulated},
    }


def _summary(figures: dict[str, Any]) -> dict[str, Any]:
    names = ("requests", "completed", "effective", "rejected", "rejected_by_reason", "failed")
    spent_s = figures.get("prefill_s")
    if spent_s is None:  # a simulation's
        spent_s = figures["prefill_compute_s"]["mean"] * figures["completed"]
        spent_s += figures["wasted_prefill_s"]
    return {name: figures[name] for name in names} | {
        "goodput_rps": figures["goodput_rps"],
        "wasted_prefill_share": figures["wasted_prefill_s"] / spent_s if spent_s else 0.0,
        "ttft_p90_s": figures["ttft_s"]["p90"],
        "tbt_p90_s": figures["tbt_s"]["p90"],
    }


def _verdict(by_load: dict[str, Any]) -> dict[str, Any]:
    """Compares goodput at the highest load with its peak, live and simulated."""
    found: dict[str, Any] = {}
    for way in ("live", "simulated"):
        goodputs = [run[way]["goodput_rps"] for run in by_load.values()]
        last = list(by_load.values())[-1][way]
        found[way] = {
            "peak_goodput_rps": max(goodputs),
            "last_of_peak": goodputs[-1] / max(*goodputs, 1e-9),
            "last_wasted_prefill_share": last["wasted_prefill_share"],
            "last_decode_deviation": last["oscillation"]["decode_deviation"],
            "last_prefill_correlation": last["oscillation"]["prefill_correlation"],
        }
    return found


def _swing(verdicts: dict[str, Any]) -> dict[str, float]:
    """Standard deviation of the decode load with prediction over that with early rejection, at the
    highest load; empty unless both ran and it swings at all."""
    if not {"early", "predictive"} <= set(verdicts):
        return {}
    found = {}
    for way in ("live", "simulated"):
        early = verdicts["early"][way]["last_decode_deviation"]
        predictive = verdicts["predictive"][way]["last_decode_deviation"]
        if not early:
            return {}
        found[way] = predictive / early
    return found


_HEADER = (
    f"{'admission':<11}{'load':>5}{'':>11}{'requests':>9}{'goodput':>9}{'effective':>10}"
    f"{'rejected':>9}{'wasted':>8}{'decode sd':>10}{'corr':>6}{'queue':>6}{'MiB':>6}"
)


def _lines(admission: str, load: float, found: dict[str, Any]) -> Iterator[str]:
    for way in ("live", "simulated"):
        run = found[way]
        correlation = run["oscillation"]["prefill_correlation"]
        together = "" if correlation is None else f"{correlation:+.2f}"
        memory = f"{run['peak_worker_mib']:>6}" if "peak_worker_mib" in run else ""
        yield (
            f"{admission:<11}{load:>5g}{way:>11}{run['requests']:>9}{run['goodput_rps']:>9.3f}"
            f"{run['effective']:>10}{run['rejected']:>9}{run['wasted_prefill_share']:>8.1%}"
            f"{run['oscillation']['decode_deviation']:>10.3f}{together:>6}"
            f"{run['peak_waiting']:>6.0f}{memory}"
        )


def _words(admission: str, verdict: dict[str, Any]) -> str:
    live, simulated = verdict["live"], verdict["simulated"]
    return (
        f"{admission}: at the highest load {live['last_of_peak']:.0%} of its peak goodput live"
        f" ({simulated['last_of_peak']:.0%} simulated), prefill wasted"
        f" {live['last_wasted_prefill_share']:.1%} ({simulated['last_wasted_prefill_share']:.1%})"
    )
