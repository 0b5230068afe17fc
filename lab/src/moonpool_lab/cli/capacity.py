"""`moonpool bench capacity`: the highest rate at which the SLOs hold, simulated or live."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonpool.cli.inputs import open_catalogue_and_profile, read_rows
from moonpool.cli.options import (
    COUNT,
    FACTOR,
    SHARE,
    TRACE_HELP,
    ConfigFlags,
    SectionedCommand,
    attainment_option,
    catalogue_option,
    confidence_option,
    config_option,
    first_seed_option,
    json_option,
    processes_option,
    requests_option,
    scale_option,
    seeds_option,
)
from moonpool.cli.output import check_folders, fail, need_package, one_line, show_figures
from moonpool.cli.server.address import Server, asks_server
from moonpool.cli.simulate import CLUSTER_DEFAULTS, CLUSTER_KEYS, read_cluster
from moonpool.pages.units import given_percent
from moonpool.plan.confidence import Attainment
from moonpool_lab.profiling.capacity import Capacity, CapacityGoal, CapacityPoint, Measure

if TYPE_CHECKING:
    from moonpool.config.tables import Config
    from moonpool.plan.simulation_pool import SimulationPool
    from moonpool.plan.trial import Workload
    from moonpool.trace.row import TraceRow

_FLAGS = ConfigFlags(*CLUSTER_KEYS)
DRAWN_REQUESTS = 200


@click.command(
    cls=SectionedCommand,
    screen=(
        "--trace",
        "--config",
        "--prefill",
        "--decode",
        "--mixed",
        "--device",
        "--shape",
        "--kv-tokens",
        "--slo-ttft",
        "--slo-tbt",
        "--attainment",
        "--runs",
        "--requests",
        "--api-key",
        "--ca-file",
        "--json",
    ),
)
@asks_server(default=None, former_flag="--url")
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    help=f"{TRACE_HELP} A generated conversation unless given.",
)
@config_option
@_FLAGS.options(CLUSTER_DEFAULTS)
@catalogue_option
@attainment_option
@confidence_option
@click.option(
    "--tolerance",
    type=SHARE,
    default=0.05,
    show_default=True,
    help="Largest relative gap between the rate that holds and the rate that fails.",
)
@seeds_option
@click.option(
    "--runs", type=COUNT, default=100, show_default=True, help="Most runs of all rates together."
)
@scale_option
@click.option(
    "--start", type=FACTOR, default=1.0, show_default=True, help="Speed at which to begin."
)
@requests_option
@first_seed_option
@processes_option
@json_option
def capacity(
    trace_file: str | None,
    config_file: str | None,
    catalogue_file: str | None,
    attainment: float,
    confidence: float,
    tolerance: float,
    seeds: int,
    runs: int,
    server: Server | None,
    scale: Fraction,
    start: float,
    requests: int | None,
    seed: int,
    processes: int | None,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Find the highest rate at which the SLOs hold, in simulation or on the server at URL.

    The search bisects the speed of the trace. Seed 0 plays the trace unchanged; each other seed
    plays a sample made of stretches of the trace. A rate is judged when the confidence interval of
    its attainment excludes --attainment. A live server gets one replay after another, each with new
    tokens.
    """
    from moonpool.plan.simulation_pool import SimulationPool, SimulationPoolError, num_cores
    from moonpool.plan.trial import Workload

    check_folders(json_file)
    need_package("scipy")
    config = read_cluster(config_file, _FLAGS.overrides(flags))
    catalogue, profile = open_catalogue_and_profile(config, catalogue_file)
    rows, block_tokens = _read_rows(trace_file, scale, requests)
    trace_rps = _rate_rps(rows)
    goal = CapacityGoal(attainment, confidence, tolerance, seeds, runs, seed)
    workload = Workload(rows, block_tokens, catalogue, profile)
    header = (
        f"{'speed':>8} {'requests/s':>10} {'effective':>10}  {given_percent(confidence)} interval"
    )
    if server is not None:
        live, taken = _live(server, workload, flags.get("slo_ttft"), flags.get("slo_tbt"))
        trace_rps = _rate_rps(taken)
        click.echo(header)
        found = _search(live, start, goal, trace_rps)
    else:
        click.echo(header)
        simulations = SimulationPool(workload, processes or num_cores())
        with one_line(SimulationPoolError), simulations as pool_of_runs:
            found = _search(_simulated(pool_of_runs, config), start, goal, trace_rps)
    click.echo(conclusion(found, goal, trace_rps))
    show_figures(_figures(found, goal, trace_rps, config, server), json_file)


def _read_rows(
    trace_file: str | None, scale: Fraction, requests: int | None
) -> tuple[tuple[TraceRow, ...], int]:
    """Returns the scaled rows and the tokens of their blocks.

    Ends the command if the rows have no rate.
    """
    from moonpool.trace.builtin import CONVERSATION
    from moonpool.trace.generate import BLOCK_TOKENS, generate
    from moonpool.trace.transform import scale_rows

    if trace_file is None:
        generated = generate(CONVERSATION, num_requests=max(requests or DRAWN_REQUESTS, 2), seed=1)
        return tuple(scale_rows(generated, scale)), max(int(BLOCK_TOKENS * scale), 1)
    rows, block_tokens = read_rows(trace_file, requests, scale)
    if len(rows) < 2 or rows[-1].arrived_s <= 0:
        fail(f"{trace_file} has no rate: all its requests come at once; use a longer trace")
    return rows, block_tokens


def _rate_rps(rows: Sequence[TraceRow]) -> float:
    return len(rows) / rows[-1].arrived_s


def _simulated(pool_of_runs: SimulationPool, config: Config) -> Measure:
    from moonpool.plan.trial import Trial

    def measure(points: Sequence[tuple[float, int]]) -> list[Attainment]:
        outcomes = pool_of_runs.run([Trial(config, seed, speed) for speed, seed in points])
        for outcome in outcomes:
            if outcome.error:
                fail(outcome.error)
        return [outcome.attainment for outcome in outcomes]

    return measure


def _live(
    server: Server, workload: Workload, ttft_s: float | None, tbt_s: float | None
) -> tuple[Measure, Sequence[TraceRow]]:
    """Returns how rates are measured on the server, and the rows that it takes."""
    from moonpool_lab.profiling.capacity import LiveCapacity, one_by_one
    from moonpool_lab.replay.player import UnservableError
    from moonpool_lab.replay.server import ServerUnfitError

    live = LiveCapacity(
        server.url,
        workload.rows,
        workload.block_tokens,
        ttft_s,
        tbt_s,
        server.api_key,
        server.ca_file,
    )
    with one_line(ServerUnfitError, ValueError):
        num_long = live.check()
    if num_long:
        click.echo(
            f"left out: {num_long} of {len(workload.rows)} requests, which are longer than the"
            " server takes (--scale-tokens makes them shorter)"
        )

    def measure(speed: float, seed: int) -> Attainment:
        if sys.stderr.isatty():
            seconds = live.rows[-1].arrived_s / speed
            click.echo(f"speed {speed:.3f}, seed {seed}: takes about {seconds:.0f} s", err=True)
        with one_line(ServerUnfitError, UnservableError, ValueError):
            return live.measure(speed, seed)

    return one_by_one(measure), live.rows


def _search(measure: Any, start: float, goal: CapacityGoal, trace_rps: float) -> Capacity:
    from moonpool_lab.profiling.capacity import search_capacity

    def show(point: CapacityPoint) -> None:
        low, mean, high = point.interval.low, point.interval.mean, point.interval.high
        click.echo(
            f"{point.rate:>8.3f} {point.rate * trace_rps:>10.3f} {mean:>10.2%}  {low:.2%} to"
            f" {high:.2%} of {len(point.runs)} seeds: {point.verdict.value}"
        )

    return search_capacity(measure, start, goal, show)


def conclusion(found: Capacity, goal: CapacityGoal, trace_rps: float) -> str:
    """Returns the result in one or two sentences."""
    wanted, confidence = given_percent(goal.wanted), given_percent(goal.confidence)
    sure = f"{wanted} of requests within both SLOs (at {confidence} confidence)"
    if not found.holds:
        least = found.points[0].rate
        return f"No rate was found with {sure}; the lowest tried is {least * trace_rps:.3g}/s."
    text = f"Up to {found.holds * trace_rps:.3g} requests/s (speed {found.holds:.3g}): {sure}."
    if found.fails == float("inf"):
        return f"{text} No rate was found that fails: a trace this short ends before a queue forms."
    text += f" At {found.fails * trace_rps:.3g} (speed {found.fails:.3g}) it clearly fails"
    if found.unclear:
        rates = ", ".join(f"{point.rate:.3g}" for point in found.unclear)
        text += f"; between, at speed {rates}, {goal.max_seeds} seeds do not tell"
    text += f". {found.num_runs} runs"
    return f"{text}, all that were allowed." if found.ended == "runs used up" else f"{text}."


def _figures(
    found: Capacity, goal: CapacityGoal, trace_rps: float, config: Config, server: Server | None
) -> dict[str, Any]:
    rates = {
        "holds_rps": found.holds * trace_rps,
        "fails_rps": found.fails * trace_rps if found.fails < float("inf") else None,
        "estimate_rps": found.estimate * trace_rps if found.estimate is not None else None,
    }
    figures: dict[str, Any] = msgspec.to_builtins(found)
    figures["fails"] = found.fails if found.fails < float("inf") else None
    api = {"api_keys": len(config.api.api_keys)}
    tables = msgspec.to_builtins(config)
    if server is not None:
        return {
            "capacity": rates | figures,
            "trace_rps": trace_rps,
            "goal": msgspec.to_builtins(goal),
            "url": server.url,
        }
    return {
        "capacity": rates | figures,
        "trace_rps": trace_rps,
        "goal": msgspec.to_builtins(goal),
        "config": tables | {"api": tables["api"] | api},
    }
