"""Makes docs/reliability.md from results: faults, kills, planted bugs, fuzzing, trials.

`moonpool bench faults` writes the page; `python -m benchmarks.reliability_page` writes it again
from existing results.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.markdown import code, measured_by, plain, table
from moonpool.distributions import interpolated

KILLS = ROOT / "benchmarks" / "results" / "kills.json"
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
MUTANTS = ROOT / "benchmarks" / "results" / "mutants.json"
FUZZ = ROOT / "benchmarks" / "results" / "fuzz.json"
TRIALS = ROOT / "benchmarks" / "results" / "trials.json"
FOUND = ROOT / "benchmarks" / "found_faults.md"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

This page is generated: `moonpool bench faults` injects each fault into a server of real processes
under running streams, and writes this page and
[faults.json](../benchmarks/results/faults.json). "Right" answers equal those of the undisturbed
server, token for token. Recovery is the time from the fault until a new request is answered right;
times depend on the machine and on what else it does.

"""
CAMPAIGN = """
## Any process, at any moment

`moonpool bench kills` kills (`kill -9`) and stops (SIGSTOP) every kind of process but the
supervisor at random moments, under streams that run all the time. Each answer is compared with that
of the undisturbed server, bit for bit. A pause is the longest time between two tokens of a stream
that ran when the fault came, up to the next fault.

"""
TAIL = """
## What this does not cover

Faults that a public server cannot be given, such as lost links, damaged transfers and clock pauses,
are covered by the seeded swarm (`tests/sim`), the soak (`tests/soak`) and the contract tests of
transfers. [SECURITY.md](../SECURITY.md) has the threats and their tests.
"""
FOUND_HEAD = """
## Faults found, and their tests

What hostile clients, unlucky operators, new users and the tests of other servers found, what holds
since, and the test that holds it.

"""
TRIAL_HEAD = """
## Trials

`moonpool bench trials` looks for wrong answers of each system on one machine, in quiet
and under load, with forked prefixes, evictions, cache resets, and clients that leave.
An answer that load changes is not wrong if rounding explains it.
[Live runs](live.md#wrong-answers) says how that is told, and which systems can use
their stores without a GPU.

"""
TRIAL_HEADER = (
    *("system", "answers", "other text under load", "wrong", "foreign text", "cut, hung"),
    "proven",
)
OUTCOMES = ("right", "wrong", "cut", "refused", "hung")


def page(found: dict[str, Any], kills: dict[str, Any]) -> str:
    """Returns the page with the table of single faults and the tables of the campaign."""
    rows = []
    for row in found["faults"]:
        seen = ", ".join(f"{row['seen'][o]} {o}" for o in OUTCOMES if row["seen"].get(o))
        lost = row["not_recovered"]
        seen += f"; {lost} times no recovery within 60 s" if lost else ""
        p50, p99 = (f"{v:.2f} s" if v is not None else "-" for v in (row["p50_s"], row["p99_s"]))
        rows.append((row["fault"], row["times"], row["promised"], seen, p50, p99))
    header = ("fault", "times", "promised", "seen", "P50", "P99 of recovery")
    single = f"{HEAD}{table(header, rows)}\n{measured_by(found)}.\n"
    campaign = f"{CAMPAIGN}{_campaign(kills)}\n{measured_by(kills)}.\n"
    return single + campaign + TAIL + FOUND_HEAD + FOUND.read_text() + _others()


def _campaign(kills: dict[str, Any]) -> str:
    arrangements, processes = [], []
    pauses: dict[tuple[str, str, bool], list[float]] = {}
    times: Counter[tuple[str, str, bool]] = Counter()
    for one in kills["arrangements"]:
        seen = ", ".join(f"{one['answers'][o]:,} {o}" for o in ("right", "wrong", "refused", "cut"))
        calm = one["undisturbed_pause_s"].get("max")
        quiet = "-" if calm is None else f"{calm:.2f} s"
        arrangements.append((one["arrangement"], one["faults"], seen, quiet))
        for row in one["rows"]:
            key = (row["kind"], row["signal"], row["had_twin"])
            pauses.setdefault(key, []).extend(row["pauses_s"])
            times[key] += row["times"]
    for key in sorted(pauses):
        kind, signal, had_twin = key
        name = f"{kind}, one of two" if had_twin else kind
        processes.append((name, signal, times[key], *_quantiles(pauses[key])))
    header = ("processes", "faults", "answers", "longest pause without a fault")
    by_process = ("process", "signal", "times", "P50", "P99", "longest pause")
    return f"{table(header, arrangements)}\n{table(by_process, processes)}"


def _quantiles(pauses: list[float]) -> tuple[str, str, str]:
    if not pauses:
        return ("-",) * 3
    ordered = sorted(pauses)
    p50, p99, most = (interpolated(ordered, share) for share in (0.5, 0.99, 1.0))
    return f"{p50:.2f} s", f"{p99:.2f} s", f"{most:.2f} s"


def _others() -> str:
    sections = ((MUTANTS, mutant_section), (FUZZ, fuzz_section), (TRIALS, trial_section))
    return "".join(make(json.loads(path.read_text())) for path, make in sections if path.exists())


def mutant_section(found: dict[str, Any]) -> str:
    """Lists planted bugs, and the test that finds each."""
    rows = found["mutants"]
    like = {issue for row in rows for issue in row["like"]}
    text = f"""
## Planted bugs

Each of these {len(rows)} bugs is a small patch of our code, and a check must find it.
{sum(bool(row["like"]) for row in rows)} of them are of the kind of {len(like)} public
issues of other systems. `python -m tests.sim.mutants` plants them one by one;
`make long` tests all. The checks are seeded: the swarm simulates clusters with faults,
`wire` moves blocks between two messengers, and `disk` keeps them in files.

"""
    cells = []
    for row in rows:
        issues = ", ".join(row["like"]) or "-"
        what = code(row["what"].removeprefix("AssertionError: ")[:60])
        case = "-" if row["case"] is None else row["case"]
        cells.append((row["name"], issues, row["check"], case, what))
    header = ("planted bug", "a bug of this kind", "check", "first case that finds it", "found as")
    return text + table(header, cells)


def fuzz_section(found: dict[str, Any]) -> str:
    """Inputs and findings by reader."""
    kinds = ("crashes", "hangs", "tracebacks", "errors_5xx", "growth", "other")
    words = ("crashes", "hangs", "tracebacks", "5xx", "memory", "other")
    rows = [
        (name, f"{counts['inputs']:,}", *(counts[kind] for kind in kinds))
        for name, counts in found["readers"].items()
    ]
    ran = f"{found['inputs']:,} mutated inputs by `{found['origin']['command']}`; runs add up."
    return f"\n## Fuzzing\n\n{ran}\n\n{table(('reader', 'inputs', *words), rows)}"


def trial_section(found: dict[str, Any]) -> str:
    """The trial of several systems."""
    rows: list[tuple[object, ...]] = []
    for name, figures in found["servers"].items():
        phases = [figures["quiet"], figures["load"]]

        def total(group: str, *keys: str, phases: list[Any] = phases) -> int:
            return sum(phase[group].get(key, 0) for phase in phases for key in keys)

        cells = (
            name,
            sum(phase["answered"] for phase in phases),
            sum(number for kind, number in figures["load"]["kinds"].items() if kind != "right"),
            total("kinds", "wrong", "missing", "doubled"),
            sum(phase["foreign"] for phase in phases),
            total("failed", "cut", "hung"),
            "; ".join(figures["proven"]) or "nothing",
        )
        rows.append(cells)
    rows += ((name, f"left out: {plain(why)}", *"-----") for name, why in found["absent"].items())
    return f"{TRIAL_HEAD}{table(TRIAL_HEADER, rows)}\n{measured_by(found)}.\n"


def current() -> str:
    """The page that the committed results give."""
    return page(json.loads(RESULTS.read_text()), json.loads(KILLS.read_text()))


if __name__ == "__main__":
    PAGE.write_text(current())
