"""One GGUF file by moonpool, llama.cpp and ik_llama.cpp: prefill, decode and perplexity.

All engines run in turns in each round, so changes of the machine's speed affect them equally. The
ratios are medians of the rounds' ratios. moonpool runs in this process, llama.cpp in a process of
its own (`gguf_peer.py`) that waits while moonpool computes, ik_llama.cpp in one for each timing.

The share of the read bandwidth counts the bytes that a decode step must read: all weights once, and
the KVCache of each context. An embedding is counted only if it is also the output layer.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.errors import BenchError
from benchmarks.suite.engine.formats import (
    BATCHES,
    CONTEXT,
    PREFILL,
    ModelVariant,
    Say,
    make_variant,
    perplexity,
)
from benchmarks.suite.engine.ik_peer import IkPrograms
from benchmarks.suite.engine.machine_limits import read_bytes_per_s
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model, open_tokenizer
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.gguf.reader import GgufFile, read_gguf
from moonpool_engine.engine.spec import ModelSpec

STEPS = 8
JOBS = (f"prefill_{PREFILL}", *(f"decode_{batch}" for batch in BATCHES))
ANSWER_S = 900.0
PEER = "llama.cpp"


@dataclass(frozen=True, slots=True)
class GgufBenchPlan:
    """How often, and with how many threads, each engine runs."""

    rounds: int = 7
    threads: tuple[int, ...] = (1, 2)
    llama_python: str | None = None
    ik_programs: Path | None = None  # folder with the programs of ik_llama.cpp


class TimedPeer(Protocol):
    """Another engine that runs the same steps."""

    name: str
    is_warm: bool
    """Whether its first timing is as good as the next."""

    def time_s(self, job: str, threads: int) -> float:
        """Seconds of one step. Raises BenchError."""
        ...


class LlamaProcess:
    """The process of `gguf_peer.py`, asked one thing at a time."""

    name = PEER
    is_warm = False

    def __init__(self, python: str, path: Path) -> None:
        plan = {"context": CONTEXT, "batches": BATCHES, "prefill": PREFILL, "steps": STEPS}
        script = Path(__file__).with_name("gguf_peer.py")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [python, str(script), str(path), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={name: v for name, v in os.environ.items() if name != "PYTHONPATH"},
            )
        except OSError as error:
            raise BenchError(f"{python} does not start: {error.strerror}") from None
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise

    def ask(self, **what: Any) -> dict[str, Any]:
        """Raises BenchError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"llama.cpp ended: {self._last_words()}") from None
        return self._answer()

    def time_s(self, job: str, threads: int) -> float:
        """Seconds of one step. Raises BenchError."""
        return float(self.ask(do="time", job=job, threads=threads)["seconds"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], ANSWER_S)[0]:
            raise BenchError(f"llama.cpp gave no answer in {ANSWER_S:.0f} s")
        line = stdout.readline()
        if not line:
            raise BenchError(f"llama.cpp ended: {self._last_words()}")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise BenchError(f"llama.cpp ended with {line!r} instead of figures") from None
        return found

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def bench_gguf_engines(
    name: str,
    tokens: int,
    text: Path,
    plan: GgufBenchPlan,
    say: Say,
) -> dict[str, Any]:
    """Seconds, shares of the read bandwidth and perplexity. Raises ModelError, BenchError."""
    torch.set_num_threads(1)
    path = gguf_file(name)
    if path is None:
        raise ModelError(f"{name} is no GGUF file: give one, or compare formats with --converted")
    variants = {
        kind: make_variant(f"moonpool {kind}", open_model(name, kind))
        for kind in ("float32", "bfloat16")
    }
    stored = open_model(name, "float32")
    spec = stored.spec
    words = text.read_text()
    ids = open_tokenizer(stored.tokenizer, spec.vocab_size).encode(words)
    if len(ids) < tokens:
        raise ModelError(f"{text} has {len(ids)} tokens, fewer than {tokens}")
    others: list[TimedPeer] = []
    if plan.ik_programs is not None:
        others.append(IkPrograms(plan.ik_programs, path, CONTEXT, STEPS))
    with _peer(plan.llama_python, path, say) as peer:
        quality = _quality(variants, peer, ids[:tokens], say)
        if peer is not None:
            theirs = peer.ask(do="tokenize", text=words)["ids"]
            quality["same_tokens"] = theirs == ids
            others.insert(0, peer)
        seconds = _seconds(list(variants.values()), others, ids, plan, say)
        version = None if peer is None else peer.version
    read = {threads: _read_rate(threads) for threads in plan.threads}
    weights = weight_bytes(read_gguf(path))
    return {
        "file_bytes": path.stat().st_size,
        "weight_bytes": sum(weights),
        "context": CONTEXT,
        "rounds": plan.rounds,
        "llama_cpp_python": version,
        "read_bytes_per_s": {str(threads): rate for threads, rate in read.items()},
        "perplexity": quality | {"text": text.name, "tokens": tokens},
        "threads": {
            str(threads): _figures(seconds[threads], spec, weights, read[threads], say, threads)
            for threads in plan.threads
        },
    }


@contextmanager
def _peer(python: str | None, path: Path, say: Say) -> Iterator[LlamaProcess | None]:
    if python is None:
        say("llama.cpp: not compared (give --llama-python)")
        yield None
        return
    process = LlamaProcess(python, path)
    try:
        yield process
    finally:
        process.close()


class WeightBytes(NamedTuple):
    """Bytes of the tensors that a decode step reads: of all rows, and of all experts together."""

    common: int
    experts: int

    def read_by(self, spec: ModelSpec, batch: int) -> float:
        """Returns the expected weight bytes that a step with `batch` rows reads, if rows choose
        their experts uniformly at random."""
        if spec.experts is None:
            return self.common
        missed = (1 - spec.experts.per_token / spec.experts.count) ** batch
        return self.common + self.experts * (1 - missed)


def weight_bytes(file: GgufFile) -> WeightBytes:
    untied = "output.weight" in file.tensors
    sizes = {
        name: entry.end - entry.begin
        for name, entry in file.tensors.items()
        if not (untied and name == "token_embd.weight")
    }
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    return WeightBytes(sum(sizes.values()) - experts, experts)


def _quality(
    variants: dict[str, ModelVariant], peer: LlamaProcess | None, ids: list[int], say: Say
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kv, variant in variants.items():
        own = {"moonpool": perplexity(variant, ids)}
        if peer is not None:
            own[PEER] = float(peer.ask(do="perplexity", ids=ids, kv=kv)["perplexity"])
            own["ratio"] = own["moonpool"] / own[PEER]
        found[kv] = own
        say(f"perplexity, {kv} KVCache: " + ", ".join(f"{n} {v:.4f}" for n, v in own.items()))
    return found


def _seconds(
    variants: list[ModelVariant],
    peers: Sequence[TimedPeer],
    ids: list[int],
    plan: GgufBenchPlan,
    say: Say,
) -> dict[int, dict[str, dict[str, list[float]]]]:
    """Seconds of one step by threads, engine and job, a number per round."""
    names = [variant.name for variant in variants] + [peer.name for peer in peers]
    found: dict[int, dict[str, dict[str, list[float]]]] = {
        threads: {name: {job: [] for job in JOBS} for name in names} for threads in plan.threads
    }
    for variant in variants:
        variant.run(variant.entries(max(BATCHES), 0, ids[:CONTEXT]))
    for number in range(plan.rounds + 1):  # the first round touches pages, and does not count
        for threads in plan.threads:
            torch.set_num_threads(threads)
            for job in JOBS:
                for variant in variants:
                    seconds = _step_s(variant, job, ids)
                    if number:
                        found[threads][variant.name][job].append(seconds)
                for peer in peers:
                    if not number and peer.is_warm:
                        continue
                    seconds = peer.time_s(job, threads)
                    if number:
                        found[threads][peer.name][job].append(seconds)
        say(f"round {number} of {plan.rounds}" if number else "warm")
    return found


def _step_s(variant: ModelVariant, job: str, ids: list[int]) -> float:
    kind, _, number = job.rpartition("_")
    if kind == "prefill":
        entries, steps = variant.entries(1, 0, ids[: int(number)]), 1
    else:
        # Rows of other tokens choose other experts. The peer decodes the same tokens.
        rows = [variant.entries(i + 1, CONTEXT, [decode_token(i)])[i] for i in range(int(number))]
        entries, steps = rows, STEPS
    began_s = time.perf_counter()
    for _ in range(steps):
        variant.run(entries).argmax(-1)
    return (time.perf_counter() - began_s) / steps


def decode_token(row: int) -> int:
    """The token that a row of a batch decodes."""
    return (1 + 17 * row) % 256


def _read_rate(threads: int) -> float:
    torch.set_num_threads(threads)
    return read_bytes_per_s()


def decode_bytes(spec: ModelSpec, weights: WeightBytes, batch: int, kv_bytes: int) -> float:
    """Bytes that one decode step must read."""
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * kv_bytes
    return weights.read_by(spec, batch) + batch * CONTEXT * token_bytes


def times_key(peer: str) -> str:
    """The key of the figure that is moonpool's rate divided by a peer's."""
    return f"times_{peer.replace('.', '_')}"


def _figures(
    seconds: dict[str, dict[str, list[float]]],
    spec: ModelSpec,
    weights: WeightBytes,
    read: float,
    say: Say,
    threads: int,
) -> dict[str, Any]:
    peers = [name for name in seconds if not name.startswith("moonpool")]
    found: dict[str, Any] = {}
    for name, jobs in seconds.items():
        own: dict[str, Any] = {}
        kv_bytes = 4 if name == "moonpool float32" else 2  # llama.cpp's default is float16
        for job, times in jobs.items():
            kind, _, number = job.rpartition("_")
            figures = {"seconds": times, "tokens_per_s": int(number) / median(times)}
            if kind == "decode":
                must = decode_bytes(spec, weights, int(number), kv_bytes)
                figures["read_share"] = must / median(times) / read
            for peer in peers if name not in peers else ():
                pairs = zip(seconds[peer][job], times, strict=True)
                figures[times_key(peer)] = median(theirs / ours for theirs, ours in pairs)
            own[job] = figures
        found[name] = own
        rates = ", ".join(f"{job} {own[job]['tokens_per_s']:,.1f}" for job in own)
        say(f"{threads} threads, {name}: tokens/s {rates}")
    return found
