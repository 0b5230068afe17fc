"""Writes docs/benchmarks.md from benchmarks/results/*.json: `python -m benchmarks.page`.

`--check` writes nothing and ends with status 1 if the page differs from the results. A test runs
the check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.checkout import ROOT
from benchmarks.cli.page_section import write_or_check
from benchmarks.markdown import seconds as _seconds
from benchmarks.markdown import table
from benchmarks.markdown import times as _times
from benchmarks.page_gguf import GGUF_HEADER, gguf_rows
from benchmarks.page_live import (
    CONVERSATION_HEADER,
    FRONT_SECTION,
    SIMULATOR_PEER_SECTION,
    admission_rows,
    admission_workload_rows,
    colocated_rows,
    conductor_rows,
    conversation_rows,
    overload_rows,
    plan_rows,
    start_rows,
)
from benchmarks.page_programs import PROGRAM_SECTION

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

This page is generated: `python -m benchmarks.page` writes it from
[benchmarks/results](../benchmarks/results). Each table names its result files. Each file holds the
command, the commit and the machine it is from; the last table lists them.

Absolute times depend on the machine. Ratios are between figures of one run on one machine, with
one thread per process and nothing else running. m150 and m500 are Llama-shaped models with 0.15 B
and 0.5 B random weights in bfloat16.
"""


class Section(NamedTuple):
    """One table of the page: its text, the files that it reads, and the function that makes its
    rows."""

    title: str
    text: str
    files: tuple[str, ...]
    header: tuple[str, ...]
    rows: Callable[..., Iterable[tuple[str, ...]]]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 200 else f"{value:.3g}"


def engine_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of prefill and decode rates, with the share of the limit and the best peer."""
    for found in results:
        model = Path(found["model"]).name
        for tokens, rate in found["prefill"].items():
            share = found["shares"]["prefill"][tokens]["gemm"]
            peers = {n: p["prefill"].get(tokens) for n, p in found["peers"].items()}
            yield (f"{model}, prefill of {int(tokens):,}", *_engine_row(rate, share, "GEMM", peers))
        for context, batches in found["decode"].items():
            for batch, rate in batches.items():
                shares = found["shares"]["decode"][context][batch]
                limit = max(shares, key=lambda kind: shares[kind])
                peers = {
                    n: p["decode"].get(context, {}).get(batch) for n, p in found["peers"].items()
                }
                name = f"{model}, decode, batch {batch}, context {int(context):,}"
                words = {"gemm": "GEMM", "bandwidth": "read bandwidth"}[limit]
                yield (name, *_engine_row(rate, shares[limit], words, peers))


def _engine_row(
    rate: float, share: float, limit: str, peers: dict[str, float | None]
) -> tuple[str, ...]:
    known = {name: value for name, value in peers.items() if value}
    best = max(known, key=lambda name: known[name]) if known else None
    over = f"{_times(rate / known[best])} ({best})" if best else "-"
    over_vllm = _times(rate / known["vllm"]) if "vllm" in known else "-"
    return _rate(rate), f"{share:.2f} of {limit}", over, over_vllm


def cached_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the time to first token with and without a cached prefix."""
    for found in results:
        ttft = found["ttft_s"]
        yield (
            f"{Path(found['model']).name}, {found['prefix_tokens']:,} tokens",
            _seconds(ttft["computed"]),
            _seconds(ttft["own_cache"]),
            _seconds(ttft["fetched"]),
            f"1/{1 / found['fetched_over_computed']:.0f}",
        )


def peers_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of effective requests beside vLLM under the same SLOs, by moonpool's client."""
    for name, points in found["curves"].items():
        yield (name, *(f"{p['effective']} of {p['requests']}" for p in points))


def client_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of requests a second and goodput beside vLLM, by vLLM's client."""
    for name, points in found["curves"].items():
        yield (name, *(f"{p['requests_per_s']:.2f} ({p['goodput_rps']:.2f})" for p in points))


def fronts_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of two vLLMs behind each front."""
    for name, row in found["fronts"].items():
        yield (
            name,
            f"{row['hit_ratio']:.0%}",
            _seconds(row["ttft_mean_s"]),
            _seconds(row["ttft_p90_s"]),
            _seconds(row["seconds"]),
        )


def agreement_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of latencies of a live cluster and of its simulation."""
    for load in ("0.5", "0.8"):
        for row in found[f"load_{load}"]["rows"]:
            if row["name"].endswith(" s") and (" mean " in row["name"] or " p90 " in row["name"]):
                yield (
                    f"{row['name'][:-2]} at {load} of capacity",
                    _seconds(row["live"]),
                    _seconds(row["simulated"]),
                    f"{row['difference']:+.1%}",
                )


def simulator_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of time and memory of a simulation by its size."""
    for found in results:
        for run in found["runs"]:
            yield (
                f"{run['instances']:,}",
                f"{run['requests']:,}",
                _seconds(run["wall_s"]),
                f"{run['us_per_request']:,.0f} us",
                f"{run['peak_mib']:,.0f} MiB",
            )


def transfer_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of GB/s of blocks between two processes, by block size."""
    names = ("memcpy", "shm get", "shm get many", "tcp get", "tcp get many")
    peers = ("mooncake get", "mooncake get many", "redis get many", "tcp socket get")
    for size, row in found["sizes"].items():
        rates = row["gb_per_s"]
        values = (f"{rates[n]:.2f}" if n in rates else "-" for n in (*names, *peers))
        yield (f"{int(size) >> 10:,} KiB", *values)


def tiers_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of hit ratio and TTFT by the tiers in use."""
    for row in found["rows"]:
        yield (
            row["tiers"],
            f"{row['hit_ratio']:.0%}",
            _seconds(row["mean_ttft_s"]),
            _seconds(row["p99_ttft_s"]),
        )


def reuse_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the share of an unlimited cache's hits, as the mean over the seeds of a workload."""
    kept: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in found["rows"]:
        kept.setdefault((row["workload"], row["capacity_share"]), []).append(row["reuse_share"])
    for (workload, share), runs in kept.items():
        policies = ("lru", "lfu", "length-aware", "predictive", "belady")
        means = (sum(run[policy] for run in runs) / len(runs) for policy in policies)
        yield workload, share, *(f"{mean:.1%}" for mean in means)


def prefetch_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of a workload without and with prefetching."""
    for row in found["rows"]:
        yield (
            f"{row['workload']}, {'with' if row['prefetch'] else 'without'}",
            f"{row['hit_ratio']:.1%}",
            f"{row['loaded_share']:.1%}",
            _seconds(row["mean_ttft_s"]),
            f"{row['prefetched_blocks']:,}",
            f"{row['used_blocks']:,}",
            f"{row['wasted_blocks']:,}",
        )


def chunk_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the time between tokens of each batching policy under one load."""
    for name, row in found["load"].items():
        if isinstance(row, dict):
            measured = row["measured"]
            yield (
                name,
                _seconds(measured["tbt_p50_s"]),
                _seconds(measured["tbt_p99_s"]),
                f"{measured['within_slo']:.1%}",
            )


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Quality and speed of quantized weights."""
    for name, speed in found["speed"].items():
        quality = found["quality"].get(name)
        values = ("perplexity", "dequantized_float32")
        texts = ["-", "-"] if quality is None else [f"{quality[value]:.3f}" for value in values]
        gains = map(_times, speed["times_bfloat16"].values())
        yield name, f"{speed['matrix_bytes'] / 1e6:.0f}", *texts, *gains


def parallel_rows(tensor: dict[str, Any], pipeline: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the speed-up of ranks and of stages over one process."""
    for row in tensor["rows"]:
        name = f"2 ranks, {row['kind']} {row['size']:,}"
        yield (
            name,
            *(_seconds(row[f"{who}_s"]) for who in ("one_process", "ranks")),
            _times(row["speed_up"]),
        )
    one = pipeline["long"]["chunked"][0]["measured"]["seconds"]
    for row in pipeline["long"]["chunked"][1:]:
        if row.get("measured"):
            name = f"{row['stages']} stages, prompt of {pipeline['long']['prompt_tokens']:,}"
            seconds = row["measured"]["seconds"]
            yield name, _seconds(one), _seconds(seconds), _times(one / seconds)


def offload_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of one decode step, alone and with an attention worker."""
    for row in found["steps"]:
        yield (
            f"batch {row['batch']}, context {row['context_tokens']:,}",
            _seconds(row["local_s"]),
            _seconds(row["early"]["step_s"]),
            _seconds(row["staggered"]["step_s"]),
        )


def gpu_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of prefill and decode on a GPU, with the share of its limit."""
    for kind in ("prefill", "decode"):
        for row in found[kind]:
            name = f"{kind}, batch {row['batch']}, {row['new_tokens']:,} new tokens"
            yield (
                f"{name}, context {row['context']:,}",
                _rate(row["tokens_per_s"]),
                f"{row['of_limit']:.2f}",
            )


def table3_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields rows of the paper's figure, moonpool's figure, and the verdict."""
    for row in found["findings"][0]["rows"]:
        values = (_value(row[who], row["unit"]) for who in ("paper", "ours"))
        yield row["label"], row["unit"], *values, row["verdict"]


def _value(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.1%}" if unit == "of all" else f"{value:.4g}"


def code_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the sizes of the code base."""
    package, functions = found["package"], found["functions"]
    yield "lines of the package", f"{package['lines']:,}"
    yield "files of the package", f"{package['files']:,}"
    yield "lines of the pure rooms", f"{package['pure_room_lines']:,}"
    yield "files above 350 lines", str(package["files_above_350_lines"])
    yield "lines of a function: median, P99", f"{functions['p50']}, {functions['p99']}"
    yield (
        "words of a sentence of docs/: median, P99",
        f"{found['docs']['p50']}, {found['docs']['p99']}",
    )
    for process, files in found["walk"].items():
        yield f"files of one request in the {process}", str(files)


SECTIONS = (
    Section(
        "Engine",
        "Tokens a second of one thread. The limit is the machine's GEMM rate or its read bandwidth,"
        " measured in the same run. The peers are vLLM's CPU build, OpenVINO GenAI and llama.cpp"
        " with the same weights.",
        (
            *("engine-m150", "engine-m150-4096", "engine-m150-4096x32"),
            *("engine-m500", "engine-m500-long", "engine-m500-4096x32"),
        ),
        ("", "tokens/s", "share of the limit", "over the best peer", "over vLLM"),
        engine_rows,
    ),
    Section(
        "Engine on a GPU",
        "Eight layers of Llama-3-8B's shape in bfloat16 on an NVIDIA H200.",
        ("gpu-engine-h200",),
        ("", "tokens/s", "share of the limit"),
        gpu_rows,
    ),
    Section(
        "First token of a cached prompt",
        "The prefix is computed, found in the instance's own cache, or fetched from another"
        " process's memory.",
        ("cached-m150", "cached-m500"),
        ("", "computed", "own cache", "fetched", "fetched over computed"),
        cached_rows,
    ),
    Section(
        "Chunked prefill",
        "Time between tokens under one load, by batching policy.",
        ("sarathi",),
        ("", "TBT P50", "TBT P99", "gaps within the SLO"),
        chunk_rows,
    ),
    Section(
        "moonpool and vLLM under the same SLOs",
        "Requests that keep both SLOs, by load (0.5, 1 and 3 times what two instances bear).",
        ("peers-live",),
        ("", "0.5 x", "1 x", "3 x"),
        peers_rows,
    ),
    Section(
        "moonpool and vLLM by vLLM's client",
        "`vllm bench serve` with prompts that share prefixes. Requests a second, and in brackets"
        " those within the SLOs.",
        ("peers-vllm-client",),
        ("", "0.5 x", "1 x", "2 x"),
        client_rows,
    ),
    Section(
        "Live conversations and agents",
        "Sessions in closed loops: 40 % (chats) and 90 % (agents) of the prompt tokens were said"
        " before. Load 1 saturates two mixed instances. In the last column: the arrangement that"
        " `moonpool plan` named beforehand, and requests within the SLOs in simulation.",
        ("conversations",),
        CONVERSATION_HEADER,
        conversation_rows,
    ),
    Section(
        "Two vLLMs behind moonpool",
        "Conversations on two vLLM servers behind several fronts: one that sends to the less busy"
        " server, vLLM's own router where it was measured, and moonpool.",
        ("vllm-fronts",),
        ("", "prefix hits", "mean TTFT", "P90 TTFT", "time for all"),
        fronts_rows,
    ),
    Section(
        "Admission under overload",
        "Effective requests of a live cluster of one prefill and one decode instance, and in"
        " brackets those of its simulation. Live runs of the same kind differ by up to a tenth.",
        ("overload", "overload-m30"),
        ("", "none", "baseline", "early", "predictive", "goodput"),
        overload_rows,
    ),
    Section(
        "Start",
        "`moonpool serve` of a GGUF file of 1.05 GB (random weights of Qwen3-1.7B's shape in"
        " Q4_K, 1P+1D, 4,096 tokens of KVCache each): seconds from the command until it is ready"
        " and until the first token, CPU seconds, and memory of all processes with the KVCache"
        " in it.",
        ("start",),
        ("", "ready", "first token", "CPU", "memory"),
        start_rows,
    ),
    Section(
        "Admission, simulated",
        "Requests within both SLOs, by workload, cluster and speed of replay. No schedule exceeds"
        " the bound (`moonpool oracle`); `found` is the best schedule that a search by an admission"
        " which knows the future finds. All policies are on equal terms: an admitted request waits"
        " before its first token until the decode batch has room, and in brackets none waits. Last:"
        " the shares of bound and found that `goodput` has.",
        ("admission",),
        ("", "bound", "found", "none", "baseline", "early", "predictive", "goodput", "shares"),
        admission_rows,
    ),
    Section(
        "Admission on drawn workloads, simulated",
        "Requests within both SLOs of 400, by workload, cluster, SLOs on TTFT and TBT, arrivals and"
        " load. The load is that of the scarcest resource in the oracle's least work. All policies"
        " wait for the decode batch; in brackets none does.",
        ("admission-workloads",),
        ("", "none", "baseline", "early", "predictive", "goodput"),
        admission_workload_rows,
    ),
    Section(
        "Disaggregated and colocated",
        "Goodput in requests a second, live and in brackets simulated. At most points two mixed"
        " instances serve more than one prefill and one decode instance.",
        ("colocated",),
        ("", "1P+1D", "2 mixed"),
        colocated_rows,
    ),
    Section(
        "Live cluster and simulation",
        "m150 on 1P+1D through HTTP, beside its simulation.",
        ("agreement",),
        ("", "live", "simulated", "difference"),
        agreement_rows,
    ),
    Section(
        "Conductor",
        "CPU time of one decision by the default policies, with ten requests in flight and a"
        " thousand blocks on each instance: the median and the 99th percentile. The others are"
        " medians. Other programs kept the machine busy meanwhile.",
        ("conductor",),
        ("instances", "policies", "decision", "P99", "end of a request", "token"),
        conductor_rows,
    ),
    Section(
        "Simulator",
        "One core.",
        ("simulator", "simulator-million"),
        ("instances", "requests", "wall time", "per request", "memory"),
        simulator_rows,
    ),
    Section(*SIMULATOR_PEER_SECTION),
    Section(*FRONT_SECTION),
    Section(
        "Plans",
        "Clusters that `moonpool plan` names for generated workloads, beside an exhaustive search"
        " of all arrangements up to 8 instances that cost less by more than 3 %, with chunk sizes,"
        " caches, SSD and eviction (`benchmarks/suite/cluster/plan_proof.py`). The goal is 90 % of"
        " requests within both SLOs. In brackets: the interval of another sample, and the"
        " candidates that neither arithmetic nor a clear failure of the richest one excludes. The"
        " last columns say how many of a sample of the excluded keep the SLOs after all, and by how"
        " much the named cluster exceeds the cheapest that was found.",
        ("plan",),
        (
            *("workload", "named", "USD/h", "within the SLOs", "fresh draws in the interval"),
            *("runs and CPU time of the plan", "cheaper candidates", "audit", "too dear by"),
        ),
        plan_rows,
    ),
    Section(
        "Transfers",
        "GB/s of blocks between two processes of one machine, medians.",
        ("transfer",),
        (
            *("block", "memcpy", "shm", "shm, 16 at once", "TCP", "TCP, 16 at once", "Mooncake"),
            *("Mooncake, 16 at once", "Redis, 16 at once", "bare TCP socket"),
        ),
        transfer_rows,
    ),
    Section(
        "Tiers of the KVCache pool",
        "Conversations on two instances.",
        ("tiers-live",),
        ("tiers", "prefix hits", "mean TTFT", "P99 TTFT"),
        tiers_rows,
    ),
    Section(
        "Eviction policies",
        "Hits of a cache with a share of the workload's blocks, over those of an unlimited cache:"
        " an hour of each generated workload, means over three seeds. Belady knows the future.",
        ("reuse",),
        ("", "cache", "lru", "lfu", "length-aware", "predictive", "Belady"),
        reuse_rows,
    ),
    Section(
        "Prefetching from the SSD",
        "Sessions with regular pauses (jobs), and sessions whose next turn gets ever less likely,"
        " simulated on 4 prefill and 2 decode instances. Loaded: the share of prompt tokens that"
        " requests read from the SSD themselves. What is neither used nor wasted was still in DRAM"
        " at the end.",
        ("prefetch",),
        ("", "prefix hits", "loaded", "mean TTFT", "prefetched blocks", "used", "wasted"),
        prefetch_rows,
    ),
    Section(*PROGRAM_SECTION),
    Section(
        "Quantized weights",
        "SmolLM2-135M-Instruct in several formats, one thread. Perplexity of a text beside float32"
        " with the same weights dequantized; CPU time over that of bfloat16 weights.",
        ("formats-smollm2",),
        (
            "format",
            "MB",
            "perplexity",
            "dequantized",
            "decode, batch 1",
            "batch 8",
            "prefill of 512",
        ),
        format_rows,
    ),
    Section(
        "GGUF beside llama.cpp",
        "Tokens a second of one GGUF file by all engines, which ran in turns. In brackets: the"
        " share of the machine's read bandwidth that decode reaches over the bytes that it must"
        " read. Ratios are medians over rounds, of moonpool's rate to a peer's. The last rows"
        " are the perplexity of one text. SmolLM2 in Q4_1, for which llama.cpp has none of its"
        " faster CPU kernels, and in three formats for which it has: Q4_0, Q8_0 and Q4_K_M"
        " (`python -m benchmarks.requantized_gguf`; 180 of the 272 tensors of the last stay in"
        " formats of 32, as its rows are no multiple of 256).",
        ("gguf-smollm2", "gguf-smollm2-q4_0", "gguf-smollm2-q8_0", "gguf-smollm2-q4_k_m"),
        GGUF_HEADER,
        gguf_rows,
    ),
    Section(
        "GGUF of larger models beside llama.cpp",
        "The same for random weights in Q4_K_M (`python -m benchmarks.random_gguf`): Qwen3-1.7B and"
        " a mixture, Qwen3-30B-A3B cut to 8 layers. Perplexities say only that both compute alike.",
        ("gguf-qwen3-1.7b", "gguf-qwen3-30b-a3b"),
        GGUF_HEADER,
        gguf_rows,
    ),
    Section(
        "Ranks and stages",
        "An instance of several processes over one process.",
        ("tensor-m150", "pipeline"),
        ("", "one process", "ranks or stages", "speed-up"),
        parallel_rows,
    ),
    Section(
        "Attention offloading",
        "One decode step, with attention in the engine's process and in an attention worker.",
        ("attention",),
        ("", "local", "attention worker", "two half batches in turn"),
        offload_rows,
    ),
    Section(
        "Mooncake v3, Table 3",
        "The paper's figures beside ours.",
        ("reproduce-mooncake-v3-table3",),
        ("", "unit", "paper", "ours", "verdict"),
        table3_rows,
    ),
    Section(
        "The code",
        "How large the package is, and how many of its files run for one chat completion.",
        ("code",),
        ("", "figure"),
        code_rows,
    ),
)


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for section in SECTIONS:
        if not all((RESULTS / f"{name}.json").exists() for name in section.files):
            continue  # this section is not measured yet
        links = ", ".join(f"[{n}.json](../benchmarks/results/{n}.json)" for n in section.files)
        rows = section.rows(*(_read(name) for name in section.files))
        parts.append(
            f"## {section.title}\n\n{section.text}\nFrom {links}.\n\n{table(section.header, rows)}"
        )
    origins = table(("file", "command", "commit", "machine"), _origins())
    return "\n".join([*parts, f"## All result files\n\n{origins}"])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _origins() -> Iterator[tuple[str, ...]]:
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        origin = found.get("origin") or found.get("environment") or found
        machine = origin.get("machine") or origin.get("gpu") or "not recorded"
        command = origin.get("command") or "not recorded"
        commit = origin.get("commit") or "not recorded"
        link = f"[{path.stem}](../benchmarks/results/{path.name})"
        yield link, f"`{' '.join(command.split())}`", commit, machine


def main() -> int:
    """Writes the page, or checks it; returns the exit status."""
    return write_or_check(PAGE, page(), "python -m benchmarks.page")


if __name__ == "__main__":
    sys.exit(main())
