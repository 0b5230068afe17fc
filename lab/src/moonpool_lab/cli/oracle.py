"""`moonpool oracle`: computes what could be served with knowledge of the future, and each policy's
share of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moonpool.cli.inputs import open_catalogue_and_profile, report_skipped
from moonpool.cli.options import (
    COUNT,
    POSITIVE,
    ConfigFlags,
    SectionedCommand,
    capped_answers_option,
    catalogue_option,
    config_option,
    json_option,
    noise_option,
    requests_option,
    scale_option,
    speed_option,
    trace_option,
)
from moonpool.cli.output import check_folders, one_line, origin, write_json
from moonpool.cli.simulate import CLUSTER_DEFAULTS, CLUSTER_KEYS, read_cluster
from moonpool.config.tables import ADMISSIONS, Config, ConfigError
from moonpool.gc_tuning import rare_collections

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.sim.hardware.build import Hardware
    from moonpool.sim.workload import Arrival
    from moonpool_lab.oracle.bound import Bound
    from moonpool_lab.oracle.search import Chosen, Runner, Schedule

_FLAGS = ConfigFlags(*CLUSTER_KEYS, "conductor.seed")


@click.command(
    cls=SectionedCommand,
    screen=(
        "--trace",
        "--config",
        "--prefill",
        "--decode",
        "--mixed",
        "--device",
        "--devices-per-node",
        "--kv-tokens",
        "--slo-ttft",
        "--slo-tbt",
        "--placement",
        "--admission",
        "--requests",
        "--runs",
        "--time-limit",
        "--json",
    ),
)
@trace_option
@config_option
@_FLAGS.options(CLUSTER_DEFAULTS)
@catalogue_option
@speed_option
@requests_option
@scale_option
@noise_option
@capped_answers_option
@click.option(
    "--runs",
    type=COUNT,
    default=30,
    show_default=True,
    help="Simulations of the search for a schedule, at most.",
)
@click.option("--time-limit", type=POSITIVE, help="Seconds that the search may take, at most.")
@json_option
def oracle(
    trace_file: str,
    config_file: str | None,
    catalogue_file: str | None,
    speed: float,
    requests: int | None,
    scale: Fraction,
    noise: float,
    capped_answers: bool,
    runs: int,
    time_limit: float | None,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare the admission policies with what could be served with knowledge of the future.

    Two figures frame the optimum: a bound that no schedule on this cluster exceeds, and the best
    run of the simulator that a search finds with an admission that knows the future.
    """
    from moonpool.sim.hardware.build import build_hardware
    from moonpool.sim.settings import SimulationSettings
    from moonpool.trace.row import TraceError
    from moonpool_lab.oracle.bound import upper_bound
    from moonpool_lab.oracle.cluster import limits_of
    from moonpool_lab.oracle.search import Budget, Runner, best_schedule

    config = read_cluster(config_file, _FLAGS.overrides(flags))
    check_folders(json_file)
    with one_line(TraceError, ConfigError):
        catalogue, profile = open_catalogue_and_profile(config, catalogue_file)
        hardware = build_hardware(config, profile, catalogue, 1.0, 1.0)
        arrivals = _read_arrivals(trace_file, config, hardware, requests, speed, scale)
        demand, resources = limits_of(config, hardware, arrivals, noise)
        bound = upper_bound(demand, resources)
        settings = SimulationSettings(noise=noise, capped_answers=capped_answers)
        runner = Runner(config, hardware, arrivals, settings)
        with rare_collections():
            policies = _run_policies(runner, config)
            budget = Budget(runs, float("inf") if time_limit is None else time_limit)
            starts = list(policies.values())
            found = best_schedule(runner, demand, resources, starts, budget, _on_progress)
    figures = _figures(bound, found, policies, len(arrivals))
    _print(figures)
    of_the_run = {
        "trace": Path(trace_file).name,
        "speed": speed,
        "noise": noise,
        "runs": found.runs,
    }
    write_json(json_file, figures | {"run": of_the_run, "origin": origin()})


def _read_arrivals(
    trace_file: str,
    config: Config,
    hardware: Hardware,
    requests: int | None,
    speed: float,
    scale: Fraction,
) -> list[Arrival]:
    """Raises TraceError."""
    from moonpool.sim.workload import make_arrivals
    from moonpool.trace.reader import open_trace
    from moonpool.trace.transform import scale_trace

    trace = scale_trace(open_trace(trace_file, limit=requests, speed=speed), scale)
    report_skipped(trace.info)
    sizes = (trace.info.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
    return list(make_arrivals(trace, *sizes))


def _run_policies(runner: Runner, config: Config) -> dict[str, Chosen]:
    """Returns the effective requests with each built-in admission and with the configured one, each
    with and without the wait for a decode batch."""
    from moonpool_lab.oracle.search import WITHOUT_WAIT

    names = dict.fromkeys([*ADMISSIONS, config.conductor.admission])
    found: dict[str, Chosen] = {}
    for name in names:
        for waits in (True, False):
            label = name if waits else f"{name}{WITHOUT_WAIT}"
            found[label] = runner.policy(name, waits)
            click.echo(f"admission {label}: {len(found[label]):,} effective", err=True)
    return found


def _on_progress(runs: int, effective: int) -> None:
    if sys.stderr.isatty() or runs % 10 == 0:
        click.echo(f"search: {runs} runs, {effective:,} effective", err=True)


def _figures(
    bound: Bound, found: Schedule, policies: dict[str, Chosen], requests: int
) -> dict[str, Any]:
    best = max([len(found.effective), *map(len, policies.values())])
    return {
        "requests": requests,
        "bound": bound.most,
        "binding": {name: round(value, 1) for name, value in bound.binding.items()},
        "best_schedule": best,
        "best_schedule_refuses": requests - len(found.admitted),
        "policies": {
            name: {
                "effective": len(effective),
                "share_of_bound": _share(len(effective), bound.most),
                "share_of_best_schedule": _share(len(effective), best),
            }
            for name, effective in policies.items()
        },
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def _print(figures: dict[str, Any]) -> None:
    bound, best = figures["bound"], figures["best_schedule"]
    scarce = [name for name, value in figures["binding"].items() if value >= 1.0]
    why = f" (scarce: {', '.join(scarce)})" if scarce else ""
    rows: Sequence[tuple[str, int]] = [
        ("bound", bound),
        ("best schedule found", best),
        *((name, found["effective"]) for name, found in figures["policies"].items()),
    ]
    click.echo(f"{figures['requests']:,} requests; no schedule serves more than {bound:,}{why}")
    click.echo(f"{'admission':<22} {'effective':>9} {'of bound':>9} {'of best found':>14}")
    for name, effective in rows:
        of_best = f"{_share(effective, best):.1%}" if name != "bound" else ""
        click.echo(f"{name:<22} {effective:>9,} {_share(effective, bound):>9.1%} {of_best:>14}")
