"""Fixed numbers of instances against autoscale on a generated day whose mix shifts, simulated.

The table has effective requests, hours of instances and their price. All runs follow each other in
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.suite.cluster.role_balance import DAY_SLO
from moonpool.config.parse import parse_config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware, instance_usd_per_h
from moonpool.sim.hardware.prices import parse_prices
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import SHIFTING_DAY
from moonpool.trace.generate import BLOCK_TOKENS, generate_mix
from moonpool.types import Role, Struct

WINDOW_S = 120.0
FIXED = ((2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2))
LOADS = (0.5, 0.7, 0.85)
START = (2, 2)


class ScaledDay(Struct, frozen=True):
    """A day on this many instances; with a `load`, this is the number at the beginning of the
    day."""

    prefill: int
    decode: int
    load: float | None
    boot_s: float
    seed: int
    day_s: float

    @property
    def name(self) -> str:
        split = f"{self.prefill}P+{self.decode}D"
        return f"fixed {split}" if self.load is None else f"autoscale at {self.load:g}"


def bench_autoscale(
    boot_s: float, day_s: float, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Runs of all fixed numbers and all target loads; `tell` gets the lines of the table."""
    days = [
        ScaledDay(prefill=p, decode=d, load=None, boot_s=0.0, seed=seed, day_s=day_s)
        for p, d in FIXED
    ]
    days += [
        ScaledDay(
            prefill=START[0], decode=START[1], load=load, boot_s=boot_s, seed=seed, day_s=day_s
        )
        for load in LOADS
    ]
    tell(
        f"{'instances':<18} {'effective':>9} {'hours P':>8} {'hours D':>8} {'USD':>7}"
        f" {'USD/1,000':>9}"
    )
    runs = []
    for day in days:
        found = run_day(day)
        runs.append(found)
        tell(_line(found))
    return {"runs": runs, "cheaper_by": saving(runs)}


def run_day(day: ScaledDay) -> dict[str, Any]:
    """One simulation."""
    scale: dict[str, Any] = {"autoscale": day.load is not None, "autoscale_load": day.load or 0.7}
    config = parse_config(
        "",
        {
            "cluster": {"prefill": day.prefill, "decode": day.decode},
            "pool": {"block_tokens": BLOCK_TOKENS},
            "slo": DAY_SLO,
            "conductor": {"role_balance_window_s": WINDOW_S, **scale},
        },
        DEFAULTS,
    )
    hardware = build_hardware(config)
    simulation = Simulation(config, hardware, SimulationSettings(seed=day.seed, boot_s=day.boot_s))
    rows = generate_mix(SHIFTING_DAY, duration_s=day.day_s, seed=day.seed)
    simulation.run(make_arrivals(rows, BLOCK_TOKENS, BLOCK_TOKENS, hardware.largest_request_tokens))
    figures = summarise(simulation, 0.0)
    prices = instance_usd_per_h(config, parse_prices())
    hours = figures["instance_hours"]
    usd = sum(value * prices[Role(role)] for role, value in hours.items())
    return {
        "name": day.name,
        "load": day.load,
        "boot_s": day.boot_s,
        "requests": figures["requests"],
        "effective": figures["effective"],
        "effective_share": figures["effective_share"],
        "instance_hours": hours,
        "usd": round(usd, 2),
        "usd_per_1000_effective": round(1000 * usd / max(figures["effective"], 1), 3),
        "scaling": figures["scaling"],
    }


def _line(found: dict[str, Any]) -> str:
    hours = found["instance_hours"]
    return (
        f"{found['name']:<18} {found['effective_share']:>9.1%} {hours['prefill']:>8.2f}"
        f" {hours['decode']:>8.2f} {found['usd']:>7.2f} {found['usd_per_1000_effective']:>9.2f}"
    )


def saving(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns how much cheaper each autoscaled run is than the cheapest fixed numbers of instances
    with at least as many effective requests; None where no fixed numbers have as many."""
    fixed = [run for run in runs if run["load"] is None]
    savings: dict[str, float | None] = {}
    for run in runs:
        if run["load"] is not None:
            usd = [each["usd"] for each in fixed if each["effective"] >= run["effective"]]
            savings[run["name"]] = round(1.0 - run["usd"] / min(usd), 4) if usd else None
    return savings
