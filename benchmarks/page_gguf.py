"""Rows of docs/benchmarks.md for one GGUF file by moonpool, llama.cpp and ik_llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import times as _times

OWN = ("moonpool float32", "moonpool bfloat16")
ENGINES = (*OWN, "llama.cpp", "ik_llama.cpp")
GGUF_HEADER = (
    "",
    *ENGINES,
    "float32 over llama.cpp",
    "bfloat16 over llama.cpp",
    "bfloat16 over ik_llama.cpp",
)


def gguf_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields for each file the rates by threads and job, then perplexity by the KVCache's number
    format."""
    for found in results:
        yield from _file_rows(found)


def _file_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    model = found["model"].removesuffix(".gguf")
    for threads, engines in found["threads"].items():
        for job in engines[ENGINES[0]]:
            rates = [_rate(engines.get(name, {}).get(job)) for name in ENGINES]
            ratios = [_times(engines[name][job].get("times_llama_cpp")) for name in OWN]
            ratios.append(_times(engines[OWN[1]][job].get("times_ik_llama_cpp")))
            kind, _, number = job.rpartition("_")
            what = f"prefill of {number}" if kind == "prefill" else f"decode, batch {number}"
            yield (f"{model}: {what}, {threads} thread{'s' * (threads != '1')}", *rates, *ratios)
    for index, kv in enumerate(("float32", "bfloat16")):
        figures = found["perplexity"][kv]
        own = ["-", "-"]
        own[index] = f"{figures['moonpool']:.3f}"
        ratios = ["-", "-"]
        peer = figures.get("llama.cpp")
        if peer is not None:
            ratios[index] = f"{figures['ratio']:.4f} x"
        theirs = "-" if peer is None else f"{peer:.3f}"
        yield (f"{model}: perplexity, KVCache in {kv}", *own, theirs, "-", *ratios, "-")


def _rate(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    share = figures.get("read_share")
    rate = f"{figures['tokens_per_s']:,.1f}"
    return rate if share is None else f"{rate} ({share:.0%})"
