"""`moonpool bench formats` serves one GGUF file with moonpool's engine, and says so if llama.cpp is
missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.page_gguf import GGUF_HEADER, gguf_rows
from benchmarks.random_gguf import SHAPES, write_random_gguf
from benchmarks.suite.engine.formats import BATCHES, TEXT
from benchmarks.suite.engine.gguf_engines import (
    JOBS,
    GgufBenchPlan,
    bench_gguf_engines,
    decode_bytes,
    weight_bytes,
)
from benchmarks.suite.engine.ik_peer import IkPrograms
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.gguf.reader import read_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_random_gguf("tiny", "Q4_K_M", path)
    return path


def test_a_file_of_two_formats_has_the_precise_one_in_some_linears(tiny: Path) -> None:
    kinds = {name: entry.kind for name, entry in read_gguf(tiny).tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert {kinds[f"blk.{layer}.ffn_down.weight"] for layer in range(2)} == {"Q4_K", "Q6_K"}


def test_decode_reads_all_weights_and_each_context(tiny: Path) -> None:
    file, spec = read_gguf(tiny), open_model(str(tiny), "float32").spec
    weights = weight_bytes(file)
    assert sum(weights) == sum(entry.end - entry.begin for entry in file.tensors.values())
    assert weights.experts == 0
    shape = SHAPES["tiny"]
    added = decode_bytes(spec, weights, 8, 4) - decode_bytes(spec, weights, 7, 4)
    assert added == 256 * 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim


@pytest.mark.long
def test_decode_of_a_mixture_reads_the_chosen_experts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_random_gguf("tiny-mixture", "Q4_K_M", path)
    model, weights = open_model(str(path), "float32"), weight_bytes(read_gguf(path))
    # a token uses 2 of 4 bytes of the experts
    assert weights.read_by(model.spec, 1) == weights.common + weights.experts / 2
    assert weights.read_by(model.spec, 2) == weights.common + weights.experts * 3 / 4
    plan = GgufBenchPlan(rounds=1, threads=(1,))
    found = bench_gguf_engines(str(path), 64, TEXT, plan, print)
    assert found["weight_bytes"] == sum(weights)


@pytest.mark.long
def test_every_engine_and_job_has_a_rate_of_each_round(tiny: Path) -> None:
    said: list[str] = []
    plan = GgufBenchPlan(rounds=2, threads=(1,))
    found = bench_gguf_engines(str(tiny), 64, TEXT, plan, said.append)
    engines = found["threads"]["1"]
    assert set(engines) == {"moonpool float32", "moonpool bfloat16"}
    for jobs in engines.values():
        assert set(jobs) == set(JOBS)
        assert all(len(figures["seconds"]) == 2 for figures in jobs.values())
        assert all(jobs[f"decode_{batch}"]["read_share"] > 0 for batch in BATCHES)
    exact, rounded = (found["perplexity"][kind]["moonpool"] for kind in ("float32", "bfloat16"))
    assert math.isclose(exact, rounded, rel_tol=0.02)
    assert any("llama.cpp: not compared" in line for line in said)
    rows = list(gguf_rows({"model": "tiny.gguf", **found}))
    assert len(rows) == len(JOBS) + 2
    assert all(len(row) == len(GGUF_HEADER) for row in rows)


def test_a_peer_that_does_not_run_is_told_in_one_line(tiny: Path) -> None:
    plan = GgufBenchPlan(rounds=1, threads=(1,), llama_python=sys.executable)
    with pytest.raises(BenchError, match=r"llama\.cpp ended: .*llama_cpp"):
        bench_gguf_engines(str(tiny), 64, TEXT, plan, lambda _: None)


BENCH = """#!/bin/sh
echo "system_info: [AVX2]" >&2
echo "["; echo '{"n_prompt": 512, "avg_ns": 2000000000}'; echo "]"
"""
BATCHED = """#!/bin/sh
while [ "$1" != -npl ]; do shift; done
echo "[1795713895] | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |" >&2
echo "| 256 | 8 | $2 | 264 | 1.000 | 256.00 | 0.800 | 20.00 | 1.800 | 146.67 |" >&2
"""


def _programs(folder: Path, bench: str, batched: str) -> Path:
    for name, text in (("llama-bench", bench), ("llama-batched-bench", batched)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.long
def test_ik_llama_cpp_is_timed_by_what_its_programs_print(tiny: Path, tmp_path: Path) -> None:
    folder = _programs(tmp_path, BENCH, BATCHED)
    plan = GgufBenchPlan(rounds=1, threads=(1,), ik_programs=folder)
    found = bench_gguf_engines(str(tiny), 64, TEXT, plan, lambda _: None)
    engines = found["threads"]["1"]
    theirs = engines["ik_llama.cpp"]
    assert theirs["prefill_512"]["seconds"] == [2.0]
    assert theirs["decode_1"]["seconds"] == [1 / 20]
    # all eight answers together have 20 tokens a second
    assert theirs["decode_8"]["seconds"] == [8 / 20]
    ours = engines["moonpool bfloat16"]["prefill_512"]
    assert ours["times_ik_llama_cpp"] == 2.0 / ours["seconds"][0]
    assert all(len(row) == len(GGUF_HEADER) for row in gguf_rows({"model": "x", **found}))


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        ("#!/bin/sh\necho out of memory >&2; exit 3", "llama-bench failed: out of memory"),
        ("#!/bin/sh\necho nothing", "llama-bench printed no figures: '"),
        ("#!/none", "llama-bench does not start: No such file"),
    ],
)
def test_programs_that_print_no_figures_are_told_in_one_line(
    tiny: Path, tmp_path: Path, bench: str, said: str
) -> None:
    programs = IkPrograms(_programs(tmp_path, bench, BATCHED), tiny, 256, 8)
    with pytest.raises(BenchError, match=said):
        programs.time_s("prefill_512", 1)


def test_a_folder_without_the_programs_is_told_in_one_line(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="has no llama-bench: build ik_llama"):
        IkPrograms(tmp_path, tiny, 256, 8)
