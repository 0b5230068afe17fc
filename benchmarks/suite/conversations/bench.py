"""Runs conversations on arrangements of one machine, and keeps all runs in one file.

A run may be divided into parts. A new row replaces the earlier row with the same model, workload,
arrangement, load and client, and the basis of a model and workload is measured only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.suite.conversations.arrangements import (
    PEER,
    PLANNED,
    LiveArrangement,
    Machine,
    parse_arrangement,
    start_arrangement,
)
from benchmarks.suite.conversations.basis import Say, SessionBasis, Start, measure_basis
from benchmarks.suite.conversations.foreign import run_aiperf
from benchmarks.suite.conversations.player import play_sessions, run_figures
from benchmarks.suite.conversations.sessions import SessionShape, arriving_sessions, sessions_at
from benchmarks.suite.kept_runs import KeptRuns
from benchmarks.suite.live.vllm_shapes import reset_prefix_cache
from moonpool_lab.demo.local_server import ServerError

ROW_KEY = ("model", "workload", "system", "load", "client")
OURS, FOREIGN = "moonpool", "aiperf"


def conversation_runs(path: Path | None, origin: dict[str, str]) -> KeptRuns[SessionBasis]:
    """Raises BenchError."""
    return KeptRuns(path, ROW_KEY, SessionBasis, origin)


class ConversationPlan(msgspec.Struct, frozen=True):
    """The models, workloads, arrangements and loads to run."""

    shapes: tuple[SessionShape, ...]
    systems: tuple[str, ...]
    loads: tuple[float, ...]
    seconds: float
    seed: int
    again: bool = False  # whether to run rows that the file already has
    aiperf_python: str = ""  # "" means moonpool's own client

    @property
    def client(self) -> str:
        return FOREIGN if self.aiperf_python else OURS


def bench_conversations(
    machine: Machine,
    plan: ConversationPlan,
    runs: KeptRuns[SessionBasis],
    say: Say,
    start: Start = start_arrangement,
) -> dict[str, Any]:
    """Returns all rows of the file, and the verdicts. Raises the errors of the servers; a vLLM that
    does not start is left out."""
    model = Path(machine.model).name
    for shape in plan.shapes:
        key = f"{model}/{shape.name}"
        if key not in runs.bases:
            peer = f"{PEER}one" if machine.peer_python else ""
            runs.bases[key] = measure_basis(
                shape, machine, peer, plan.loads, plan.seconds, plan.seed, say, start
            )
            runs.write()
        basis = runs.bases[key]
        for arrangement in _arrangements(plan.systems, basis, machine, plan.client == FOREIGN, say):
            own = {"model": model, "workload": shape.name, "client": plan.client}
            cell = own | {"system": arrangement.name}
            loads = [load for load in plan.loads if plan.again or not runs.has(**cell, load=load)]
            try:
                for load, url in _servers(arrangement, loads, machine, basis, start):
                    row = _run(url, machine, shape, basis, arrangement, load, plan)
                    runs.add(row | own)
                    say(row_words(row))
            except ServerError as error:
                if arrangement.shape is None:
                    raise
                say(f"{arrangement.name:<22} left out: {error}")
    return runs.found()


def _servers(
    arrangement: LiveArrangement,
    loads: Sequence[float],
    machine: Machine,
    basis: SessionBasis,
    start: Start,
) -> Iterator[tuple[float, str]]:
    """Yields the loads, each with the URL of a server that knows nothing of the other loads."""
    groups = [loads] if arrangement.forgets and loads else [[load] for load in loads]
    for group in groups:
        with start(arrangement, machine, basis.slo) as url:
            for load in group:
                if load != group[0]:
                    reset_prefix_cache(url)
                yield load, url


def _arrangements(
    systems: Sequence[str], basis: SessionBasis, machine: Machine, refusals_fail: bool, say: Say
) -> Iterable[LiveArrangement]:
    names = dict.fromkeys(basis.planned if name == PLANNED else name for name in systems)
    if PLANNED in systems:
        say(f"planned beforehand: {basis.planned or 'no arrangement of two instances'}")
    for name in filter(None, names):
        if name.startswith(PEER) and not machine.peer_python:
            say(f"{name:<22} left out: --peer-python names no vLLM")
            continue
        found = parse_arrangement(name)
        if refusals_fail and found.shape is None and "/" not in name:
            found = parse_arrangement(f"{name}/none")
        yield found


def _run(
    url: str,
    machine: Machine,
    shape: SessionShape,
    basis: SessionBasis,
    arrangement: LiveArrangement,
    load: float,
    plan: ConversationPlan,
) -> dict[str, Any]:
    head = {"system": arrangement.name, "load": load, "seconds": plan.seconds}
    warm = arriving_sessions(shape, 2.0, 1.5, -1 - plan.seed)
    uvloop.run(play_sessions(url, [[one] for one in warm], basis.slo, 3.0))
    if plan.aiperf_python:
        folder = machine.model
        return head | run_aiperf(
            plan.aiperf_python, url, folder, shape, basis, load, plan.seconds, plan.seed
        )
    sessions = sessions_at(shape, load, basis.sessions_per_s, plan.seconds, plan.seed)
    chains = [[session] for session in sessions]
    played = uvloop.run(play_sessions(url, chains, basis.slo, plan.seconds))
    figures = run_figures(played, plan.seconds)
    if not arrangement.knows_hits:
        figures["hit_ratio"] = None
    return head | {"sessions": len(sessions)} | figures


def row_words(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    hits = "-" if row["hit_ratio"] is None else f"{row['hit_ratio']:.0%}"
    ttft, tbt = row["ttft_s"], row["tbt_s"]
    return (
        f"{row['system']:<22} load {row['load']:>4g}: {row['effective']:>5} effective of"
        f" {row['requests']:>5} ({row['rejected']} rejected, {row['failed']} failed,"
        f" {row['missed_ttft']} late, {row['missed_tbt']} slow), hits {hits},"
        f" TTFT {ttft['p50']:.3g}/{ttft['p90']:.3g} s,"
        f" TBT {1e3 * tbt['p50']:.3g}/{1e3 * tbt['p90']:.3g} ms"
    )


def verdict_lines(bases: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns lines with the forecast, the winner, and a comparison of the best moonpool with the
    best vLLM."""
    lines = []
    for key, basis in bases.items():
        model, workload = key.split("/")
        own = [r for r in rows if (r["model"], r["workload"]) == (model, workload)]
        lines.append(f"{key}: planned beforehand {basis['planned'] or 'nothing of two instances'}")
        for client in sorted({row["client"] for row in own}, reverse=True):
            lines += [f" sent by {client}:"] if client != OURS else []
            for load in sorted({row["load"] for row in own}):
                at = [row for row in own if row["load"] == load and row["client"] == client]
                lines += verdict_at(load, at, basis["simulated"].get(f"{load:g}", {}))
    return lines


def verdict_at(
    load: float, rows: Sequence[dict[str, Any]], simulated: dict[str, dict[str, Any]]
) -> list[str]:
    """Returns the verdict in one line, or no line if nothing ran at this load."""
    ours = [row for row in rows if not row["system"].startswith(PEER)]
    theirs = [row for row in rows if row["system"].startswith(PEER)]
    words = []
    if simulated:
        said = max(simulated, key=lambda name: simulated[name]["effective"])
        words.append(f"simulated best {said}")
    for name, among in ((OURS, ours), ("vLLM", theirs)):
        if among:
            best = max(among, key=lambda row: row["effective"])
            words.append(f"best of {name} {best['system']} with {best['effective']}")
    if ours and theirs:
        most = max(row["effective"] for row in theirs)
        with suppress(ZeroDivisionError):
            words.append(f"{max(row['effective'] for row in ours) / most:.2f} times")
    return [f"  load {load:g}: {', '.join(words)}"] if rows else []
