"""Measures the speed of one GPU in the matrix products, the attention and the copies of LLM
serving, and fits the cost model's constants to it.

    python benchmarks/gpu/roofline.py [--json FILE] [--quick]
    python benchmarks/gpu/roofline.py --refit FILE   (fits again the points in FILE; needs no GPU)

Needs torch with CUDA and nothing of moonpool. A time is the median over several replays of a CUDA
graph, divided by the launches in it. Each launch uses other tensors than the previous one, so that
no input is in the L2 cache. Inputs are random (seed 0): zeros draw less power and run faster.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from fit import (
    H100_CONSTANTS,
    PEAK_BYTES_PER_S,
    PEAK_FLOPS,
    GemmConstants,
    GemmFit,
    as_dict,
    fit_gemm,
    fit_line,
    layer_errors,
    mape,
    predict,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Shape = tuple[int, int]
COLD_BYTES = 256 << 20  # four times the L2 cache
REPLAY_S = 3e-3
REPLAYS = 5
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 65, 96, 127, 128, 129, 160, 192, 255, 256, 257, 264, 320)
ROWS += (384, 448, 511, 512, 520, 640, 768, 896, 1023, 1024, 1032, 1280, 1536, 2047, 2048, 2056)
ROWS += (3072, 4096, 4104, 6144, 8192)
QUICK_ROWS = (1, 64, 256, 264, 2048)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = tuple(512 << i for i in range(9))
CHUNKS, PASTS = (128, 256, 512, 1024, 2048, 4096, 8192), (0, 512, 2048, 8192, 32768, 131072)
HEADS = {"8b": (32, 8), "70b": (64, 8), "70b-tp8": (8, 1), "qwen7b": (28, 4)}
HEAD_DIM = 128


def layers() -> dict[str, list[Shape]]:
    """The (in, out) sizes of the four products of one layer: qkv, output, gate and up, down."""
    return {
        "llama3-8b": _layer(4096, 32, 8, 14336, 1),
        "llama3-8b-tp2": _layer(4096, 32, 8, 14336, 2),
        "llama3-70b": _layer(8192, 64, 8, 28672, 1),
        "llama3-70b-tp2": _layer(8192, 64, 8, 28672, 2),
        "llama3-70b-tp4": _layer(8192, 64, 8, 28672, 4),
        "llama3-70b-tp8": _layer(8192, 64, 8, 28672, 8),
        "qwen2.5-7b": _layer(3584, 28, 4, 18944, 1),
    }


def _layer(hidden: int, heads: int, kv_heads: int, inner: int, tp: int) -> list[Shape]:
    q, kv = heads * HEAD_DIM // tp, kv_heads * HEAD_DIM // tp
    return [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner // tp), (inner // tp, hidden)]


LM_HEADS = ((4096, 128256), (8192, 128256), (8192, 128256 // 8), (3584, 152064))


def time_graph(launch: Callable[[int], object], sets: int) -> float:
    """Seconds of one `launch(i)`; i walks over the sets of inputs."""
    for i in range(min(sets, 3)):
        launch(i)
    torch.cuda.synchronize()
    once_s = _events(lambda: [launch(i) for i in range(min(sets, 8))]) / min(sets, 8)
    count = int(min(max(REPLAY_S / max(once_s, 1e-6), min(sets, 64), 4), 400))
    if torch.cuda.memory_reserved() > 64 << 30:
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for i in range(count):
            launch(i % sets)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    seconds = median(_events(graph.replay) for _ in range(REPLAYS)) / count
    del graph
    return seconds


def _events(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cold_sets(set_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // set_bytes))


def measure_gemms(rows: tuple[int, ...]) -> list[GemmFit]:
    shapes = sorted({shape for own in layers().values() for shape in own} | set(LM_HEADS))
    done = []
    for k, n in shapes:
        weights = [random(n, k) * k**-0.5 for _ in range(cold_sets(2 * k * n))]
        for t in rows:
            if n <= 60000 or t <= 512:  # only the last rows go through the LM head
                done.append(GemmFit(t, k, n, _time_gemm(t, weights)))
    return done


def _time_gemm(t: int, weights: list[Tensor]) -> float:
    n, k = weights[0].shape
    count = min(len(weights), 1 + COLD_BYTES // (2 * t * k))
    xs = [random(t, k) for _ in range(count)]
    outs = [torch.empty(t, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    def launch(i: int) -> None:
        torch.mm(xs[i % count], weights[i].t(), out=outs[i % count])

    return time_graph(launch, len(weights))


def decode_attention(quick: bool) -> list[dict[str, object]]:
    """One new token per sequence; the query heads of a group are rows of one KV head."""
    done = []
    for name, (heads, kv_heads) in HEADS.items():
        for batch in DECODE_BATCHES[:: 4 if quick else 1]:
            for context in DECODE_CONTEXTS[:: 4 if quick else 1]:
                kv_bytes = 4 * batch * context * kv_heads * HEAD_DIM
                if kv_bytes > 8 << 30 or (name != "8b" and context in (1024, 4096, 16384, 65536)):
                    continue
                sets = cold_sets(kv_bytes)
                shape = (batch, kv_heads, context, HEAD_DIM)
                ks, vs = ([random(*shape) for _ in range(sets)] for _ in range(2))
                q = random(batch, kv_heads, heads // kv_heads, HEAD_DIM)
                for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                    run = _sdpa(backend, q, ks, vs)
                    row = {"heads": name, "batch": batch, "context": context}
                    done.append(row | _timed(backend, run, sets) | {"bytes": kv_bytes})
                del ks, vs
    return done


def _sdpa(backend: SDPBackend, q: Tensor, ks: list[Tensor], vs: list[Tensor]):
    def launch(i: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, ks[i], vs[i])

    return launch


def _timed(backend: SDPBackend, run: Callable[[int], object], sets: int) -> dict[str, object]:
    name = backend.name.split("_")[0].lower()
    try:
        return {"backend": name, "seconds": time_graph(run, sets)}
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {"backend": name, "error": str(error).splitlines()[0][:120]}


def prefill_attention(quick: bool) -> list[dict[str, object]]:
    """A chunk of new tokens after `past` cached ones, causal at the lower right."""
    from torch.nn.attention.varlen import varlen_attn

    done = []
    for name in ("8b", "70b-tp8"):
        heads, kv_heads = HEADS[name]
        for chunk in CHUNKS[:: 3 if quick else 1]:
            for past in PASTS[:: 3 if quick else 1]:
                pairs = chunk * (past + (chunk + 1) / 2)
                flops = 4 * heads * HEAD_DIM * pairs
                row = {"heads": name, "chunk": chunk, "past": past, "flops": flops}
                total = past + chunk
                # Query heads of their own K and V: repeated, as these calls know no groups.
                q = random(1, heads, chunk, HEAD_DIM)
                k, v = (random(1, kv_heads, total, HEAD_DIM) for _ in range(2))
                done.append(row | _timed_varlen(varlen_attn, q, k, v))
                if past == 0:
                    done.append(row | _timed_cudnn(q, k, v))
    return done


def _timed_cudnn(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    def run(_: int) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return _timed(SDPBackend.CUDNN_ATTENTION, run, 1)


def _timed_varlen(
    varlen_attn: Callable[..., object], q: Tensor, k: Tensor, v: Tensor
) -> dict[str, object]:
    chunk, total, heads = q.shape[2], k.shape[2], q.shape[1]
    group = heads // k.shape[1]
    flat_q = q[0].transpose(0, 1).contiguous()
    flat_k, flat_v = (x[0].transpose(0, 1).contiguous() for x in (k, v))
    ends_q = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")
    ends_k = torch.tensor([0, total], dtype=torch.int32, device="cuda")
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict = {"window_size": (-1, 0)} | ({"enable_gqa": True} if grouped else {})
    if not grouped:
        flat_k, flat_v = (x.repeat_interleave(group, dim=1) for x in (flat_k, flat_v))
    args = (flat_q, flat_k, flat_v, ends_q, ends_k, chunk, total)
    result = _timed(SDPBackend.FLASH_ATTENTION, lambda _: varlen_attn(*args, **options), 1)
    return result | {"backend": "varlen-gqa" if grouped else "varlen"}


def small_ops() -> list[dict[str, object]]:
    """The unfused operations between the products, and their bytes at the least."""
    return [row for t in (1, 64, 512, 2048, 8192) for row in _small_ops(t)]


def _small_ops(t: int, hidden: int = 4096, inner: int = 14336) -> list[dict[str, object]]:
    xs = [random(t, hidden) for _ in range(min(cold_sets(2 * t * hidden), 64))]
    gates = [random(t, 2, inner) for _ in range(max(2, min(len(xs), 16)))]
    weight = random(hidden)

    def silu_mul(i: int) -> Tensor:
        gate = gates[i % len(gates)]
        return F.silu(gate[:, 0]) * gate[:, 1]

    jobs = {
        "rms_norm": (lambda i: F.rms_norm(xs[i], (hidden,), weight), 4 * t * hidden),
        "add": (lambda i: xs[i].add(xs[i - 1]), 6 * t * hidden),
        "silu_mul": (silu_mul, 6 * t * inner),
    }
    return [
        {"op": name, "rows": t, "bytes": num_bytes, "seconds": time_graph(run, len(xs))}
        for name, (run, num_bytes) in jobs.items()
    ]


def copies() -> dict[str, object]:
    """Bandwidths in bytes per second (a device copy counts bytes read and written)."""
    result: dict[str, object] = {}
    big = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(big)
    best = min(_events(lambda: other.copy_(big)) for _ in range(6))
    result["device_copy"] = 2 * big.numel() / best
    wide = big.view(torch.float32).nan_to_num_()
    best = min(_events(lambda: wide.sum()) for _ in range(6))
    result["device_read"] = big.numel() / best
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    plain = torch.zeros(1 << 28, dtype=torch.uint8)
    for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20, 1 << 30):
        count = max(1, min(64, (1 << 30) // size))

        def each(up: bool, size: int = size, count: int = count) -> None:
            for i in range(count):
                at = slice(i * size, (i + 1) * size)
                if up:
                    big[at].copy_(host[at], non_blocking=True)
                else:
                    host[at].copy_(big[at], non_blocking=True)

        for up, name in ((True, "h2d"), (False, "d2h")):
            best = min(_events(lambda up=up: each(up)) for _ in range(4))
            result[f"{name}_{size >> 10}k"] = size * count / best
    best = min(_wall(lambda: big[: 1 << 28].copy_(plain)) for _ in range(3))
    result["h2d_pageable_256m"] = (1 << 28) / best
    result["both_ways_1g_each"] = _both_ways(big, other, host, back)
    result["registered_memfd"] = _registered(big)
    return result


def _both_ways(big: Tensor, other: Tensor, host: Tensor, back: Tensor) -> float:
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(up):
            big[: 1 << 30].copy_(host, non_blocking=True)
        with torch.cuda.stream(down):
            back.copy_(other[: 1 << 30], non_blocking=True)
        torch.cuda.synchronize()

    return (2 << 30) / min(_wall(run) for _ in range(4))


def _registered(big: Tensor) -> dict[str, object]:
    """A memory file, mapped and page-locked afterwards, as an arena shared with others would be."""
    import mmap
    import os

    size = 1 << 28
    descriptor = os.memfd_create("pinned", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    mapped = mmap.mmap(descriptor, size)
    host = torch.frombuffer(mapped, dtype=torch.uint8)
    host.fill_(1)
    cudart = torch.cuda.cudart()
    began_s = time.perf_counter()
    status = int(cudart.cudaHostRegister(host.data_ptr(), size, 0))
    register_s = time.perf_counter() - began_s
    if status:
        return {"cudaHostRegister": status}
    up = min(_events(lambda: big[:size].copy_(host, non_blocking=True)) for _ in range(4))
    down = min(_events(lambda: host.copy_(big[:size], non_blocking=True)) for _ in range(4))
    cudart.cudaHostUnregister(host.data_ptr())
    pinned = {"register_s_per_gib": register_s * 4, "is_pinned": host.is_pinned()}
    return pinned | {"h2d": size / up, "d2h": size / down}


def _wall(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def overheads() -> dict[str, float]:
    """Returns the seconds of a launch that does next to nothing: issued one by one, and inside a
    graph."""
    x = random(8)
    eager_s = min(_wall(lambda: [x.add_(1) for _ in range(2000)]) for _ in range(5)) / 2000
    weight, row = random(1024, 1024), random(1, 1024)
    linear_s = min(_wall(lambda: [F.linear(row, weight) for _ in range(1000)]) for _ in range(5))
    return {
        "eager_add": eager_s,
        "graph_add": time_graph(lambda _: x.add_(1), 1),
        "eager_linear": linear_s / 1000,
        "sync": min(_wall(lambda: None) for _ in range(20)),
        "item": min(_wall(lambda: x[0].item()) for _ in range(20)),
    }


def summary(gemms: list[GemmFit], decode: list, prefill: list) -> dict[str, object]:
    ranked = fit_gemm(gemms)
    tiles = sorted({c.tile for _, c in ranked})
    result: dict[str, object] = {
        "gemm": _score(gemms, ranked[0][1]),
        "gemm_with_h100_constants": _score(gemms, H100_CONSTANTS),
        "gemm_ranked": [as_dict(c) | {"mape": error} for error, c in ranked[:8]],
        "gemm_by_tile": {x: min(error for error, c in ranked if c.tile == x) for x in tiles},
    }
    for rows, work, peak, name in (
        (decode, "bytes", PEAK_BYTES_PER_S, "decode_attention"),
        (prefill, "flops", PEAK_FLOPS, "prefill_attention"),
    ):
        kept = [r for r in rows if "seconds" in r]
        kept += _fastest(kept)
        keys = sorted({(r["backend"], r["heads"]) for r in kept})
        result[name] = {
            f"{backend}/{heads}": as_dict(_line(kept, backend, heads, work, peak))
            for backend, heads in keys
        }
    return result


def _fastest(rows: list[dict]) -> list[dict]:
    """Returns the time of the fastest backend for each point, as backend "fastest"."""
    best: dict[tuple, dict] = {}
    for row in rows:
        point = tuple(row.get(x) for x in ("heads", "batch", "context", "chunk", "past"))
        if point not in best or row["seconds"] < best[point]["seconds"]:
            best[point] = row
    return [row | {"backend": "fastest"} for row in best.values()]


def _score(gemms: list[GemmFit], c: GemmConstants) -> dict[str, object]:
    measured = np.array([g.seconds for g in gemms])
    own_layers = layer_errors(list(layers().items()), gemms, c)
    return as_dict(c) | {"mape": mape(predict(gemms, c), measured), "layers": own_layers}


def _line(rows: list, backend: str, heads: str, work: str, peak: float):
    own = [r for r in rows if r["backend"] == backend and r["heads"] == heads]
    return fit_line([r[work] for r in own], [r["seconds"] for r in own], peak)


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def gpu_state() -> str:
    query = "driver_version,clocks.sm,power.draw,temperature.gpu"
    return _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def environment() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "state": gpu_state(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", "benchmarks/gpu/roofline.py", *sys.argv[1:]]),
        "peaks": {"flops": PEAK_FLOPS, "bytes_per_s": PEAK_BYTES_PER_S},
        "seed": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a few points of each, to try it out")
    parser.add_argument("--refit", type=Path, help="fit again the points of an earlier --json")
    options = parser.parse_args()
    if options.refit:
        refit(options.refit)
        return
    if not torch.cuda.is_available():
        sys.exit("roofline.py measures a GPU, and torch finds none here")
    torch.manual_seed(0)
    report: dict = {"environment": environment()}
    parts: dict[str, Callable[[], object]] = {
        "copies": copies,
        "overheads": overheads,
        "gemms": lambda: measure_gemms(QUICK_ROWS if options.quick else ROWS),
        "decode": lambda: decode_attention(options.quick),
        "prefill": lambda: prefill_attention(options.quick),
        "small_ops": small_ops,
    }
    for name, part in parts.items():
        began_s = time.perf_counter()
        with torch.inference_mode():
            report[name] = part()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began_s:.1f} s; {gpu_state()}", flush=True)
        if options.json:
            _write(options.json, report)
    report["fit"] = summary(report["gemms"], report["decode"], report["prefill"])
    if options.json:
        _write(options.json, report)
    print(json.dumps({k: report[k] for k in ("copies", "overheads", "small_ops", "fit")}, indent=1))


def refit(path: Path) -> None:
    report = json.loads(path.read_text())
    report["gemms"] = [GemmFit(t, k, n, us / 1e6) for t, k, n, us in report["gemms"]]
    report["fit"] = summary(report["gemms"], report["decode"], report["prefill"])
    _write(path, report)
    print(json.dumps(report["fit"], indent=1))


def _write(path: Path, report: dict[str, object]) -> None:
    """Points as compact rows, one part per line."""
    plain = dict(report)
    plain["gemms"] = [
        [g.t, g.k, g.n, round(g.seconds * 1e6, 3)] for g in report.get("gemms", [])
    ]  # columns: rows, in, out, microseconds
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
