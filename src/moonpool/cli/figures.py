"""Figures of a simulation or a replay as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from moonpool.pages.units import GAP
from moonpool.sim.report.notes import NO_HASHES, outside_domain
from moonpool.sim.report.page import describe_cluster
from moonpool.sim.simulation import Simulation

SHOWN_TENANTS = 8
LATE_S = 0.05
"""A client whose requests leave later than this on average did not keep up."""


def print_figures(figures: dict[str, Any], simulation: Simulation) -> None:
    """Prints the main figures of a simulation; `--json` has all of them."""
    for name, text in (*_requests(figures, simulation), *_work(figures)):
        click.echo(f"{name:<12} {text}")


def _requests(figures: dict[str, Any], simulation: Simulation) -> Iterator[tuple[str, str]]:
    """Yields what clients observed."""
    config = simulation.config
    conductor, slo = config.conductor, config.slo.usual
    yield "cluster", describe_cluster(config).rstrip(",").replace(GAP, " ")
    yield "policies", f"placement {conductor.placement}, admission {conductor.admission}"
    yield "requests", f"{figures['requests']:,} in {simulation.last_arrival_s:,.0f} s"
    yield _effective(figures, slo.ttft_s, slo.tbt_s)
    yield "rejected", _rejected(figures)
    yield "failed", f"{figures['failed']:,}"
    yield from _latencies(figures)
    yield from _slo_classes(figures)
    yield from _tenants(figures)


def _effective(figures: dict[str, Any], ttft_s: float, tbt_s: float) -> tuple[str, str]:
    share = f"{figures['effective']:,} ({figures['effective_share']:.1%})"
    text = f"within TTFT {ttft_s:g} s and TBT {tbt_s:g} s"
    text += ", or the SLOs of their class" if figures.get("slo_classes") else ""
    return "effective", f"{share} {text}: {figures['goodput_rps']:.3f} requests/s"


def _rejected(figures: dict[str, Any]) -> str:
    reasons = ", ".join(f"{n} {reason}" for reason, n in figures["rejected_by_reason"].items())
    return f"{figures['rejected']:,}" + (f" ({reasons})" if reasons else "")


def _latencies(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "TTFT", _spread(figures["ttft_s"], 1.0, "s")
    yield "TBT", _spread(figures["tbt_s"], 1e3, "ms") + " (each gap)"
    yield "", _spread(figures["tbt_top10_mean_s"], 1e3, "ms") + " (longest tenth of a request)"


def _slo_classes(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a line for each class of service levels that requests named."""
    for number, (name, found) in enumerate(figures.get("slo_classes", {}).items()):
        share = found["effective"] / max(found["requests"], 1)
        text = f"{found['effective']:,} of {found['requests']:,} ({share:.1%}) within its SLOs"
        label = "" if number else "classes"
        yield label, f"{name}: {text}, TTFT {_spread(found['ttft_s'], 1.0, 's')}"


def _tenants(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a line for each of the tenants with most requests, if the trace names tenants."""
    tenants = figures.get("tenants", {})
    most = sorted(tenants, key=lambda name: -tenants[name]["requests"])[:SHOWN_TENANTS]
    for number, name in enumerate(most):
        found = tenants[name]
        share = f"{found['effective']:,} of {found['requests']:,} effective"
        share += f", hits {found['hit_ratio']:.0%}"
        label = "" if number else "tenants"
        yield label, f"{name or '(none)'}: {share}, TTFT {_spread(found['ttft_s'], 1.0, 's')}"
    if len(tenants) > len(most):
        yield "", f"and {len(tenants) - len(most)} other tenants (--json has all)"


def _work(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what the cluster did."""
    cache, transfer = figures["cache"], figures["transfer"]
    fetched = cache["fetched_tokens"] / max(cache["input_tokens"], 1)
    hits = f"{cache['hit_ratio']:.1%} of {cache['input_tokens']:,} prompt tokens"
    loaded = cache["loaded_tokens"] / max(cache["input_tokens"], 1)
    ssd = figures["ssd"]
    from_ssd = f", {loaded:.1%} from the SSD" if ssd["slots"] else ""
    yield "cache", f"{hits} ({fetched:.1%} by fetch{from_ssd})"
    if not figures.get("trace_has_hashes", True):
        yield "", NO_HASHES
    if ssd["slots"]:
        moved = f"{ssd['written_bytes'] / 1e12:.2f} TB written, {ssd['read_bytes'] / 1e12:.2f} read"
        refused = f"{ssd['refused_blocks']:,} blocks refused, {ssd['dropped_blocks']:,} dropped"
        yield "SSD", f"{moved}; {refused}; {ssd['blocks']:,} of {ssd['slots']:,} slots filled"
    wasted = f"{figures['wasted_prefill_s']:.0f} s wasted on {figures['wasted_prefills']}"
    yield "prefill", f"{figures['prefill_compute_s']['mean']:.3f} s a request; {wasted}"
    fetches = f"{transfer['fetched_bytes'] / 1e12:.2f} TB in {transfer['fetches']:,} fetches"
    yield "transfers", f"{transfer['bytes'] / 1e12:.2f} TB, of which {fetches}"
    busy = ", ".join(f"{role} {share:.0%}" for role, share in figures["utilisation"].items())
    bubbles = figures["bubbles"]
    yield "busy", f"{busy}; {bubbles['count']:,} bubbles of {bubbles['mean_s']:.2f} s"
    if figures["roles"]["mode"] != "off":
        yield "roles", _roles(figures["roles"])
    if "instance_hours" in figures:
        yield "hours", _hours(figures)
    if outside := outside_domain(figures):
        yield "cost", outside
    error = figures["predicted_ttft_error_s"]
    yield "predicted", f"TTFT off by {error['mean_absolute']:.3f} s, bias {error['bias']:+.3f} s"
    seen = figures["predictions"]
    tbt, decoding = seen["tbt_s"], seen["decoding"]
    text = f"TBT off by {tbt['mean_absolute'] * 1e3:.3g} ms, bias {tbt['mean'] * 1e3:+.3g} ms; "
    yield "", f"{text}answers decoding by {decoding['mean_absolute']:.3g}"
    learned = [
        f"{kind} x {span['least']:.3g} to {span['most']:.3g} on {span['changed']}"
        for kind, span in figures["learned"].items()
        if span["changed"]
    ]
    if learned:
        believed = "" if figures["config"]["conductor"]["learning"] else ", and not used"
        yield "learned", f"{', '.join(learned)} instances{believed}"
    simulated = f"{figures['simulated_s']:,.0f} s of simulated time, {figures['events']:,} events"
    yield "took", f"{figures['wall_s']:.1f} s for {simulated}, seed {figures['seed']}"


def replay_lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields name and text of the main figures of a replay; `--json` has all of them."""
    slo, cache, client = figures["slo"], figures["cache"], figures["client"]
    cut = " (interrupted)" if figures["interrupted"] else ""
    yield "requests", f"{figures['requests']:,} in {figures['simulated_s']:,.1f} s{cut}"
    yield _effective(figures, slo["ttft_s"], slo["tbt_s"])
    yield from _slo_classes(figures)
    resent = f"; {figures['resent']:,} sent again" if figures["resent"] else ""
    yield "rejected", _rejected(figures) + resent
    unfinished = f", {figures['unfinished']:,} given up" if figures["unfinished"] else ""
    yield "failed", f"{figures['failed']:,}{unfinished}"
    for error, number in figures["errors"].items():
        yield "", f"{number} x {error[:160]}"
    yield from _latencies(figures)
    yield "cache", f"{cache['hit_ratio']:.1%} of {cache['input_tokens']:,} prompt tokens"
    cost = f"{client['cpu_us_per_token']:.0f} us of CPU per token"
    late = client["late_s"]
    yield (
        "client",
        f"{cost}; requests left {late['mean'] * 1e3:.1f} ms late (most {late['max']:.2g} s)",
    )
    if client["delayed"] or late["mean"] > LATE_S:
        yield (
            "",
            (
                f"this client did not keep up: {client['delayed']:,} requests waited for one of its"
                " slots; raise --concurrency, or give it a core of its own"
            ),
        )


def _hours(figures: dict[str, Any]) -> str:
    """Says for how long instances ran, what that costs, and how often their number changed."""
    hours = figures["instance_hours"]
    text = " + ".join(f"{value:.4g} {role}" for role, value in hours.items())
    usd = figures.get("usd")
    if usd is not None:
        text += f" = {usd:,.2f} USD"
        if figures["effective"]:
            text += f", {1000 * usd / figures['effective']:.3g} per 1,000 effective requests"
    scaling = figures["scaling"]
    if scaling["wanted"]:
        text += f"; {scaling['boots']} started, {scaling['drains']} ended"
    return text


def _roles(roles: dict[str, Any]) -> str:
    """Says what the role balance did, and its last advice."""
    advice = roles["announced"]
    text = f"{roles['switches']} switches, {roles['given_up']} given up"
    if roles["mode"] == "advise":
        text = f"{len(advice)} times advised"
    return f"{text}; at {advice[-1][0]:,.0f} s: {advice[-1][1]}" if advice else text


def _spread(summary: dict[str, float], factor: float, unit: str) -> str:
    """Formats a distribution in one line."""
    parts = [f"{name} {summary[name] * factor:.3g}" for name in ("mean", "p50", "p90", "p99")]
    return f"{', '.join(parts)} {unit}"
