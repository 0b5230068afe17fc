"""Measures other engines on the same weights and the same rows, each under its own Python.

Starts the scripts `*_peer.py` of this folder, which import nothing of moonpool except `peer_rows`,
and reads their output. An engine that is not asked for, or does not run, gets one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.errors import BenchError
from benchmarks.suite.engine.engine_rows import ELEMENT_BYTES, EngineBenchRows
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.spec import ModelSpec

SCRIPTS = {
    "vllm": "vllm_peer.py",
    "openvino": "openvino_peer.py",
    "llama.cpp": "llama_peer.py",
}
KV_SLACK = 1.25
"""Other engines round the size of their KVCache up, and use some of it themselves."""
Say = Callable[[str], None]


def measure_peers(
    model: str,
    pythons: Mapping[str, str],
    rows: EngineBenchRows,
    repeats: int,
    eager: bool,
    say: Say,
) -> dict[str, Any]:
    """Returns figures by peer. A peer that fails has `error` instead, and the others are still
    measured. Raises BenchError if none of the given peers ran."""
    found: dict[str, Any] = {}
    for name in SCRIPTS:
        if name not in pythons:
            say(f"{name}: not compared (no Python of its own was given)")
    if not pythons:
        return found
    loaded = open_model(model, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(loaded, Path(folder))
        for name, python in pythons.items():
            say(f"{name} on the same weights")
            plan = msgspec.to_builtins(rows) | {
                "repeats": repeats,
                "eager": eager,
                "longest_tokens": rows.longest_tokens,
                "kv_gib": kv_gib(loaded.spec, rows.kv_tokens),
                "decodes": [
                    {"batch": batch, "context": context, "lengths": rows.lengths(batch, context)}
                    for context in rows.contexts
                    for batch in rows.batches
                ],
            }
            try:
                found[name] = _run(name, python, folder, plan)
            except BenchError as error:
                say(f"{name}: not compared: {error}")
                found[name] = {"error": str(error)}
    failed = [figures["error"] for figures in found.values() if "error" in figures]
    if failed and len(failed) == len(found):
        raise BenchError(failed[0])
    return found


def kv_gib(spec: ModelSpec, kv_tokens: int) -> int:
    """Whole GiB that hold this many tokens, with some to spare."""
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * ELEMENT_BYTES
    return int(KV_SLACK * kv_tokens * token_bytes / (1 << 30)) + 1


def _run(name: str, python: str, folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name(SCRIPTS[name])
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [python, str(script), folder, json.dumps(plan)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | one_thread,
        )
    except OSError as error:
        raise BenchError(f"{python} does not start: {error.strerror}") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchError(f"{name} ended with status {done.returncode}: {last}")
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        raise BenchError(f"{name} ended with {lines[-1]!r} instead of figures") from None
    return found
