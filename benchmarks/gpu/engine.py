"""Measures the engine's steps on one GPU, compared with the GPU's peak rates.

    usage: python benchmarks/gpu/engine.py [--ops triton|torch] [--model NAME] [--json FILE]

Prefill: one chunk after some tokens in the KVCache. Decode: a batch, each sequence with a context.
The limit of a step is the larger of its arithmetic over the peak and its bytes (weights, KVCache)
over the bandwidth. Whole steps are timed, with planning, launches and greedy sampling, once each
kernel is compiled; best of several. "Mirrored" prefills also bring each layer's blocks into a
page-locked arena in host memory before the layer is announced, as a prefill instance does.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.suite.engine.engine_rows import prefill_flops
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.cuda.host_sync import HostGpuSync
from moonpool_engine.engine.cuda.torch_ops import TorchOps
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.engine.spec import ModelSpec

PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 4.8e12
# Eight layers of the shape of Llama-3-8B.
MODEL = "random:hidden=4096,layers=8,heads=32,kv_heads=8,head_dim=128,inter=14336,vocab=32768"
MODEL += ",context=131072"
PREFILLS = ((128, 0), (512, 0), (2048, 0), (8192, 0), (512, 8192), (2048, 30000))
DECODES = ((1, 512), (1, 8192), (1, 65536), (8, 4096), (32, 4096), (128, 2048))
GREEDY = SamplingParams(temperature=0.0)
REPEATS = 8


def step_of(engine: Engine, batch: int, new: int, context: int) -> list[StepEntry]:
    blocks = engine.layout.blocks_for(new + context)
    return [
        StepEntry(
            AttemptId(str(i)),
            [(i + 7 * t) % 999 for t in range(new)],
            context,
            range(i * blocks, (i + 1) * blocks),
            GREEDY,
        )
        for i in range(batch)
    ]


def limit_s(spec: ModelSpec, batch: int, new: int, context: int) -> float:
    embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    kv = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim * batch * (new + context)
    flops = prefill_flops(spec, new)
    flops += 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * new * context
    num_bytes = 2 * (spec.num_parameters - embedding) + kv
    return max(batch * flops / PEAK_FLOPS, num_bytes / PEAK_BYTES_PER_S)


def measure(engine: Engine, batch: int, new: int, context: int) -> dict[str, float]:
    step = step_of(engine, batch, new, context)
    on_layer = None if engine.host_sync is None else lambda layer: None
    engine.step(step, on_layer)
    engine.step(step, on_layer)
    seconds = min(engine.step(step, on_layer).seconds for _ in range(REPEATS))
    least_s = limit_s(engine.spec, batch, new, context)
    return {
        "batch": batch,
        "new_tokens": new,
        "context": context,
        "seconds": round(seconds, 7),
        "tokens_per_s": round(batch * new / seconds, 1),
        "limit_s": round(least_s, 7),
        "of_limit": round(least_s / seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", choices=("triton", "torch"), default="triton")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("engine.py measures a GPU, and torch finds none here")
    model = open_model(options.model, "bfloat16")
    device = torch.device("cuda")
    ops = TorchOps(device) if options.ops == "torch" else choose_ops("bfloat16", "cuda")
    layout = make_layout(model, 64, ops)
    tokens = max(batch * (context + 64) for batch, context in DECODES)
    cache = empty_cache(layout, layout.blocks_for(tokens), device)
    engine = Engine(model, ops, cache)
    commit = ["git", "rev-parse", "--short", "HEAD"]
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(
            commit, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "command": " ".join(["python", "benchmarks/gpu/engine.py", *sys.argv[1:]]),
        "model": options.model,
        "ops": ops.name,
        "prefill": [measure(engine, 1, new, context) for new, context in PREFILLS],
        "decode": [measure(engine, batch, 1, context) for batch, context in DECODES],
    }
    arena = torch.empty(cache.blocks.shape, dtype=torch.bfloat16, pin_memory=True)
    engine.host_sync = HostGpuSync(cache, arena)
    report["prefill_mirrored"] = [measure(engine, 1, new, context) for new, context in PREFILLS]
    for row in (*report["prefill"], *report["decode"], *report["prefill_mirrored"]):
        print(json.dumps(row))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
