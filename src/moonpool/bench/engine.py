"""The engine against the machine's own limits, and against vLLM's CPU build on the same weights.

Prefill is judged by the arithmetic it must do over the measured GEMM rate, decode at batch 1 by the
bytes it must read over the measured memory bandwidth; limit, we and peer in one run, one thread
each.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moonpool.bench.limits import gemm_flops_per_s, read_bytes_per_s
from moonpool.bench.solo import SoloInstance
from moonpool.engine.builtin import open_model
from moonpool.engine.export import export_checkpoint
from moonpool.engine.spec import ModelSpec

PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 128
DECODE_TOKENS = 64
CHUNK_TOKENS = 512
Report = Callable[[str], None]


class PeerError(RuntimeError):
    """The peer did not give figures; the text says why."""


def bench_engine(
    model: str, peer_python: str | None, peer_eager: bool, repeats: int, say: Report
) -> dict[str, Any]:
    """All figures of one model in bfloat16. Raises PeerError."""
    torch.set_num_threads(1)
    say("measuring the machine's limits")
    gemm = gemm_flops_per_s(torch.bfloat16)
    read = read_bytes_per_s()
    say(f"GEMM {gemm / 1e9:.0f} GFLOP/s bf16, memory read {read / 1e9:.1f} GB/s, one thread")
    solo = SoloInstance(model, "bfloat16", kv_tokens=32 * 256 + 4096, chunk_tokens=CHUNK_TOKENS)
    figures = _measure(solo, repeats, say)
    figures["limits"] = {"gemm_flops_per_s": gemm, "read_bytes_per_s": read}
    figures["model"], figures["ops"] = model, solo.engine.ops_name
    figures["ratios"] = _ratios(solo.spec, figures, gemm, read)
    del solo
    if peer_python is not None:
        say("measuring vLLM on the same weights")
        figures["vllm"] = _measure_peer(model, peer_python, peer_eager, repeats)
        figures["ours_over_vllm"] = {
            kind: {size: rate / figures["vllm"][kind][size] for size, rate in figures[kind].items()}
            for kind in ("prefill", "decode")
        }
        again = read_bytes_per_s(), gemm_flops_per_s(torch.bfloat16)
        figures["limits_after"] = {"gemm_flops_per_s": again[1], "read_bytes_per_s": again[0]}
    return figures


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Arithmetic of one prompt: linears of all tokens, causal attention, one row of logits."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    per_layer = spec.hidden_size * (2 * q + 2 * kv) + 3 * spec.hidden_size * spec.intermediate_size
    linears = 2.0 * num_tokens * spec.num_layers * per_layer
    attention = 4.0 * spec.num_layers * q * num_tokens * (num_tokens + 1) / 2
    return linears + attention + 2.0 * spec.hidden_size * spec.vocab_size


def decode_bytes(spec: ModelSpec, context_tokens: float, element_bytes: int = 2) -> float:
    """What one token at batch 1 must read: all weights but the embedding table, and its KVCache."""
    embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context_tokens
    return element_bytes * (spec.num_parameters - embedding + kv)


def _measure(solo: SoloInstance, repeats: int, say: Report) -> dict[str, Any]:
    rng = random.Random(1)

    def seconds(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        vocab = solo.spec.vocab_size
        prompts = [[rng.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(batch)]
        return solo.generate(prompts, new_tokens).seconds

    def best(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        seconds(batch, prompt_tokens, new_tokens)
        return min(seconds(batch, prompt_tokens, new_tokens) for _ in range(repeats))

    found: dict[str, Any] = {"prefill": {}, "decode": {}}
    for tokens in PREFILL_TOKENS:
        found["prefill"][str(tokens)] = tokens / best(1, tokens, 1)
        say(f"prefill of {tokens}: {found['prefill'][str(tokens)]:.0f} tokens/s")
    for batch in DECODE_BATCHES:
        spent_s = best(batch, CONTEXT_TOKENS, 1 + DECODE_TOKENS) - best(batch, CONTEXT_TOKENS, 1)
        found["decode"][str(batch)] = batch * DECODE_TOKENS / spent_s
        say(f"decode at batch {batch}: {found['decode'][str(batch)]:.1f} tokens/s")
    return found


def _ratios(spec: ModelSpec, figures: dict[str, Any], gemm: float, read: float) -> dict[str, float]:
    ratios = {
        f"prefill_{tokens}_of_gemm": prefill_flops(spec, tokens)
        * figures["prefill"][str(tokens)]
        / tokens
        / gemm
        for tokens in PREFILL_TOKENS
    }
    context = CONTEXT_TOKENS + DECODE_TOKENS / 2
    ratios["decode_1_of_bandwidth"] = decode_bytes(spec, context) * figures["decode"]["1"] / read
    return ratios


def _measure_peer(model: str, python: str, eager: bool, repeats: int) -> dict[str, Any]:
    plan = {
        "prefill": PREFILL_TOKENS,
        "decode": DECODE_BATCHES,
        "context": CONTEXT_TOKENS,
        "decode_tokens": DECODE_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "max_model_tokens": 4096,
        "repeats": repeats,
        "eager": eager,
    }
    script = Path(__file__).with_name("vllm_peer.py")
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(open_model(model, "bfloat16"), Path(folder))
        done = subprocess.run(  # noqa: S603 - the interpreter the person named
            [python, str(script), folder, json.dumps(plan)],
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerError(f"vLLM ended with status {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
