"""Tests rows of the engine's comparison: their shapes, their limits, and peers that do not run."""

from __future__ import annotations

import ast
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkout import ROOT
from benchmarks.errors import BenchError
from benchmarks.suite.engine import engine as bench
from benchmarks.suite.engine import quantization
from benchmarks.suite.engine.engine import (
    bench_engine,
    row_lines,
    shares,
)
from benchmarks.suite.engine.engine_peers import measure_peers
from benchmarks.suite.engine.engine_rows import (
    EngineBenchRows,
    decode_bytes,
    decode_flops,
    prefill_bytes,
    prefill_flops,
)
from moonpool_engine.engine.random_weights import random_spec

TINY = "random:hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,inter=128,vocab=320"
SPEC, _ = random_spec(TINY)
ROWS = EngineBenchRows(prefills=(40,), batches=(1, 3), contexts=(64,), chunk_tokens=32, steps=6)
ROWS_8_BIT = EngineBenchRows(prefills=(40,), batches=(1, 8), contexts=(512,), steps=3)
LIMITS = {"gemm_flops_per_s": 1e9, "read_bytes_per_s": 1e8}


def test_sequences_that_join_early_begin_shorter_so_that_all_meet_at_one_length() -> None:
    lengths = EngineBenchRows(chunk_tokens=512, steps=32).lengths(3, 4096)
    assert lengths == [(4096 - 16, 16 + 33), (4096 - 8, 8 + 33), (4096, 33)]
    assert {prompt + answer for prompt, answer in lengths} == {4096 + 33}
    assert all(prompt >= 256 for prompt, _ in EngineBenchRows(chunk_tokens=1).lengths(32, 512))


def test_what_a_row_must_do_and_read() -> None:
    weights = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128)
    head = 64 * 320
    token_kv = 2 * 2 * 2 * 16
    assert decode_bytes(SPEC, 3, 100) == 2 * (weights + head) + 3 * 2 * token_kv * 100
    assert decode_flops(SPEC, 3, 100) == 3 * (2 * (weights + head) + 4 * 2 * 64 * 100)
    assert prefill_flops(SPEC, 1) == decode_flops(SPEC, 1, 1)
    # There are two chunks: they read the weights twice, and the first chunk's KVCache once.
    assert prefill_bytes(SPEC, 64, 32) == 2 * 2 * weights + 32 * 2 * token_kv
    assert decode_bytes(SPEC, 1, 0, weight_bytes=1) == weights + head


def test_every_row_is_measured_and_set_beside_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "gemm_flops_per_s", lambda _: 1e9)
    monkeypatch.setattr(bench, "read_bytes_per_s", lambda: 1e8)
    found = bench_engine(TINY, ROWS, {}, False, 1, lambda _: None)
    assert found["prefill"].keys() == {"40"}
    assert {c: set(rates) for c, rates in found["decode"].items()} == {"64": {"1", "3"}}
    rate = found["decode"]["64"]["3"]
    share = decode_bytes(SPEC, 3, 64 + 3) * rate / 3 / 1e8
    assert found["shares"]["decode"]["64"]["3"]["bandwidth"] == pytest.approx(share)


def test_the_table_sets_ours_beside_the_best_peer() -> None:
    ours: dict[str, Any] = {"prefill": {"40": 300.0}, "decode": {"64": {"3": 50.0}}}
    ours["shares"] = shares(SPEC, ROWS, ours, LIMITS)
    ours["limits"] = LIMITS
    ours["peers"] = {
        "vllm": {"prefill": {"40": 100.0}, "decode": {"64": {"3": 40.0}}},
        "openvino": {"prefill": {"40": 200.0}, "decode": {"64": {"3": 100.0}}},
        "llama.cpp": {"error": "it is not there"},
    }
    _, head, prefill, decode = row_lines(ours)
    assert "openvino" in head and "llama" not in head
    assert prefill.startswith("prefill 40") and prefill.endswith(" 1.500")
    assert decode.startswith("decode 3 x 64") and decode.endswith(" 0.500")


def _python(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_a_peer_that_fails_is_told_in_one_line_and_the_others_count(tmp_path: Path) -> None:
    good = _python(tmp_path, "good", 'print("warming up")\nprint(\'{"prefill": {"40": 1.0}}\')')
    bad = _python(tmp_path, "bad", 'raise SystemExit("no module named openvino")')
    said: list[str] = []
    peers = {"vllm": good, "openvino": bad}
    found = measure_peers(TINY, peers, ROWS, 1, False, said.append)
    assert found["vllm"] == {"prefill": {"40": 1.0}}
    assert "no module named openvino" in found["openvino"]["error"]
    assert any(line.startswith("llama.cpp: not compared") for line in said)
    assert any(line.startswith("openvino: not compared") for line in said)
    with pytest.raises(BenchError, match="no module named openvino"):
        measure_peers(TINY, {"openvino": bad}, ROWS, 1, False, said.append)
    with pytest.raises(BenchError, match="does not start"):
        measure_peers(TINY, {"vllm": str(tmp_path / "none")}, ROWS, 1, False, said.append)


def test_eight_bits_are_set_beside_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"gemm_flops_per_s": 1e9, "read_bytes_per_s": 1e8}
    monkeypatch.setattr(quantization, "machine_limits", lambda: limits)
    monkeypatch.setattr(quantization, "ROWS", ROWS_8_BIT)
    found = quantization.bench_quantization(TINY, 4, 6, 0, lambda _: None)
    quality = found["quality"]
    assert quality["positions"] == 24
    assert 0 < quality["kl_mean"] <= quality["kl_p99"] <= quality["kl_max"] < 0.1
    assert quality["perplexity"]["int8"] == pytest.approx(
        quality["perplexity"]["bfloat16"], rel=0.1
    )
    assert 0.5 <= quality["top1_equal"] <= 1 and 0 <= quality["greedy"]["equal_tokens"] <= 1
    assert found["decode_gain"].keys() == {"1", "8"}


def test_the_scripts_of_peers_import_names_that_the_modules_beside_them_define() -> None:
    # These scripts run under another Python, where neither mypy nor a test imports them.
    folder = ROOT / "benchmarks" / "suite" / "engine"
    checked = set()
    for script in folder.glob("*_peer.py"):
        for node in ast.parse(script.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (folder / f"{node.module}.py").exists():
                module = ast.parse((folder / f"{node.module}.py").read_text())
                defined = {getattr(each, "name", None) for each in module.body}
                assert {alias.name for alias in node.names} <= defined, script.name
                checked.add(script.name)
    assert {"vllm_peer.py", "openvino_peer.py"} <= checked
