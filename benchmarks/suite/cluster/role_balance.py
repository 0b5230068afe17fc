"""Fixed numbers of prefill and decode instances against numbers that follow the load, simulated.

Simulates a generated day whose mix shifts, with every fixed split of the instances and with
switching roles. Also simulates a constant load, under which no role should switch. The mix shifts
slowly (`shifting`), or suddenly every ten minutes, differently for each seed (`abrupt`). Each run
is a separate process (`python -m benchmarks.suite.cluster.role_balance`, with its description on
standard input). As many runs go at a time as the machine has cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from benchmarks.checkout import ROOT
from benchmarks.errors import BenchError
from benchmarks.suite.cluster.role_days import DayKind, PhaseLog, day_of, phase_figures
from moonpool.config.parse import parse_config
from moonpool.config.tables import RoleBalance
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate, generate_mix
from moonpool.trace.row import TraceRow
from moonpool.types import Struct

DAY_SLO = {"ttft_s": 10.0, "tbt_s": 0.05}
LOAD_LIMIT = 0.9
CONSTANT_REQUESTS = 12_031
CONSTANT_INSTANCES = 16  # the number of instances and the rate of Mooncake's conversation trace


class RoleBalanceRun(Struct, frozen=True):
    """`day_s` 0 means the constant load."""

    prefill: int
    decode: int
    mode: RoleBalance
    window_s: float
    seed: int
    day_s: float
    day: DayKind = "shifting"

    @property
    def name(self) -> str:
        load = f"{self.day} day" if self.day_s else "constant"
        return f"{load} {self.prefill}P+{self.decode}D {self.mode}"


def bench_role_balance(
    num_instances: int,
    window_s: float,
    seeds: Iterable[int],
    tell: Callable[[str], None],
    day: DayKind = "shifting",
) -> dict[str, Any]:
    """Simulates one day for each seed. Fixed splits run with advice on, which changes only what
    they log. Raises BenchError."""
    runs = []
    for seed in seeds:
        day_s = day_of(day, seed).day_s
        splits: list[tuple[int, RoleBalance]] = [(num_instances // 2, "switch")]
        splits += [(prefill, "advise") for prefill in range(1, num_instances)]
        runs += [
            RoleBalanceRun(
                prefill=prefill,
                decode=num_instances - prefill,
                mode=mode,
                window_s=window_s,
                seed=seed,
                day_s=day_s,
                day=day,
            )
            for prefill, mode in splits
        ]
        each = CONSTANT_INSTANCES // 2
        runs.append(
            RoleBalanceRun(
                prefill=each, decode=each, mode="switch", window_s=300.0, seed=seed, day_s=0.0
            )
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = []
        for figures in pool.map(run_apart, runs):
            found.append(figures)
            tell(_line(figures))
    return {"runs": found, **compare(found), **phase_figures(found)}


def compare(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of effective requests, by split, over all seeds."""
    shares: dict[str, list[float]] = {}
    for figures in found:
        if figures["day_s"]:
            split = f"{figures['prefill']}P+{figures['decode']}D"
            name = split if figures["mode"] == "advise" else "switching"
            shares.setdefault(name, []).append(figures["effective_share"])
    means = {name: sum(values) / len(values) for name, values in shares.items()}
    fixed = {name: value for name, value in means.items() if name != "switching"}
    best = max(fixed, key=lambda name: fixed[name])
    return {
        "effective_share": {name: round(value, 4) for name, value in means.items()},
        "best_fixed": best,
        "switching_over_best_fixed": round(means["switching"] / max(fixed[best], 1e-9), 4),
        "switches_under_constant_load": [f["switches"] for f in found if not f["day_s"]],
    }


def _line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['name']:<24} {figures['effective_share']:>6.1%} of {figures['requests']:,}"
        f" effective, {figures['rejected']:,} rejected, mean TTFT {figures['ttft_s']:.2f} s,"
        f" {figures['switches']} switches, {figures['given_up']} given up"
    )


def run_apart(run: RoleBalanceRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.suite.cluster.role_balance"]
    done = subprocess.run(
        command, input=msgspec.json.encode(run), capture_output=True, check=False, cwd=ROOT
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{run.name}: {(last or ['it said nothing'])[0]}")
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def run_one(run: RoleBalanceRun) -> dict[str, Any]:
    """Runs one simulation in this process."""
    overrides: dict[str, dict[str, Any]] = {
        "cluster": {"prefill": run.prefill, "decode": run.decode},
        "pool": {"block_tokens": BLOCK_TOKENS},
        "conductor": {
            "admission": "predictive",
            "role_balance": run.mode,
            "role_balance_window_s": run.window_s,
        },
    }
    if run.day_s:
        overrides["slo"] = DAY_SLO
        overrides["conductor"]["load_limit"] = LOAD_LIMIT
    config = parse_config("", overrides, DEFAULTS)
    hardware = build_hardware(config)
    log = PhaseLog()
    simulation = Simulation(config, hardware, SimulationSettings(seed=run.seed))
    log.watch(simulation, run.day_s)
    began_s = time.perf_counter()
    simulation.run(
        make_arrivals(_rows(run), BLOCK_TOKENS, BLOCK_TOKENS, hardware.largest_request_tokens),
        log.note,
    )
    figures = summarise(simulation, time.perf_counter() - began_s)
    return {
        "name": run.name,
        **msgspec.to_builtins(run),
        **{
            name: figures[name]
            for name in ("requests", "effective", "effective_share", "rejected", "goodput_rps")
        },
        "rejected_by_reason": figures["rejected_by_reason"],
        "ttft_s": figures["ttft_s"]["mean"],
        "tbt_top10_mean_s": figures["tbt_top10_mean_s"]["mean"],
        "utilisation": figures["utilisation"],
        "switches": figures["roles"]["switches"],
        "given_up": figures["roles"]["given_up"],
        "announced": figures["roles"]["announced"],
        "phases": log.phases(day_of(run.day, run.seed)) if run.day_s else [],
        "wall_s": figures["wall_s"],
    }


def _rows(run: RoleBalanceRun) -> Iterable[TraceRow]:
    if run.day_s:
        return generate_mix(day_of(run.day, run.seed), duration_s=run.day_s, seed=run.seed)
    return generate(BUILT_IN["conversation"], num_requests=CONSTANT_REQUESTS, seed=run.seed)


if __name__ == "__main__":
    described = msgspec.json.decode(sys.stdin.buffer.read(), type=RoleBalanceRun)
    sys.stdout.write(msgspec.json.encode(run_one(described)).decode())
