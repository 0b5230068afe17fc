"""The table of the guide to the pool in vLLM, made from the results of `moonpool bench
pool-in-vllm`.

`python -m benchmarks.page_pool` writes the table between the page's two marks; the rest of the page
is written by hand. `--check` writes nothing, and ends with status 1 if the table differs from the
result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.cli.page_section import PageSection
from benchmarks.markdown import measured_by, plain, table

RESULT = ROOT / "benchmarks" / "results" / "pool-in-vllm.json"
PAGE = ROOT / "docs" / "pool-in-vllm.md"
SECTION = PageSection(
    "<!-- bench pool-in-vllm: begin -->",
    "<!-- bench pool-in-vllm: end -->",
    "python -m benchmarks.page_pool",
)
WORDS = {
    "none": "no pool",
    "offload": "vLLM's offloading",
    "offload-host": "vLLM's offloading, copies by the benchmark",
    "lmcache": "LMCache",
    "mooncake": "Mooncake Store",
    "moonpool": "**moonpool**",
}
HEADER = (
    *("pool", "TTFT of later turns: mean, P90", "TTFT of first turns", "hits: vLLM's, pool's"),
    *("requests/s", "wrong under load", "hits after `kill -9` of one, of all"),
    "what it got wrong",
)
PHASES = {
    "load": "under load",
    "after_one": "after `kill -9` of one",
    "after_all": "after `kill -9` of all",
}
PROVEN_P = 0.01


def pool_section(found: dict[str, Any]) -> str:
    """Returns one table for each workload, with the origin of its figures."""
    parts = [_workload(name, one) for name, one in found["workloads"].items()]
    known = found["versions"].values()
    peers = sorted({f"{name} {version}" for each in known for name, version in each.items()})
    parts.append(f"{measured_by(found)}, with {', '.join(peers)}.\n")
    return "\n".join(parts)


def _workload(name: str, one: dict[str, Any]) -> str:
    prefixes = one["prefixes"]
    possible = prefixes["known_tokens"] / prefixes["prompt_tokens"]
    rounds = len(one["rows"]["none"]["rounds"])
    measured = "One round." if rounds == 1 else f"Medians of {rounds} rounds."
    return (
        f"{name.capitalize()}: {one['sessions']} sessions of {one['turns']} turns,"
        f" {prefixes['prompt_tokens']:,} prompt tokens. {prefixes['distinct_tokens']:,} of them"
        f" are distinct, and each vLLM's memory holds {one['kv_tokens']:,}. {possible:.0%} of"
        f" the prompt tokens could be hits. {measured}\n\n{table(HEADER, pool_rows(one['rows']))}"
    )


def pool_rows(rows: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields one row for each pool; the row of a pool that did not run says why."""
    twin = rows["none"]
    for name, row in rows.items():
        figures = row["median"]
        if not figures:
            yield (WORDS[name], *("-",) * 6, f"does not run here: {plain(row['absent'])}")
            continue
        load = row["load"]
        yield (
            WORDS[name],
            _both(figures["returning_ttft_s"]),
            _both(figures["first_ttft_s"]),
            f"{figures['local_hit_ratio']:.0%}, {figures['pool_hit_ratio']:.0%}",
            f"{figures['requests_per_s']:.2f}",
            f"{load['unexplained']} of {load['answered']}",
            f"{_hits(row['after_one'])}, {_hits(row['after_all'])}",
            "; ".join(_faults(name, row, twin)) or "nothing found",
        )


def _faults(name: str, row: dict[str, Any], twin: dict[str, Any]) -> Iterator[str]:
    """Yields the results that are wrong in any case, and the answers that differ more often than
    in the row without a pool, where only batching causes differences."""
    for phase, when in PHASES.items():
        counts = row[phase]
        if counts["foreign"]:
            yield f"{counts['foreign']} answers with text of others {when}"
        if counts["unexplained"]:
            yield f"{counts['unexplained']} of {counts['answered']} answers wrong {when}"
        if counts["failed"]:
            failed = ", ".join(f"{n} {kind}" for kind, n in counts["failed"].items())
            yield f"{failed} {when}"
    if name != "none" and row["p_more_differing_than_twin"] < PROVEN_P:
        differing = row["load"]["differing"], twin["load"]["differing"]
        yield f"{differing[0]} answers differ under load, {differing[1]} without a pool"
    if name != "none" and not row["after_one"]["cached_tokens"]:
        yield "nothing found again after `kill -9` of one"
    if name != "none" and not row["after_all"]["cached_tokens"]:
        yield "nothing found again after `kill -9` of all"
    if row["absent"]:
        yield f"ended early: {plain(row['absent'])}"


def _hits(counts: dict[str, Any]) -> str:
    if not counts["prompt_tokens"]:
        return "-"
    return f"{counts['cached_tokens'] / counts['prompt_tokens']:.0%}"


def _both(seconds: dict[str, float]) -> str:
    return f"{seconds['mean']:.2f}, {seconds['p90']:.2f} s"


def main(page: Path = PAGE, result: Path = RESULT) -> int:
    """Writes the table, or checks it; returns the exit status."""
    return SECTION.main(page, lambda: pool_section(json.loads(result.read_text())))


if __name__ == "__main__":
    sys.exit(main())
