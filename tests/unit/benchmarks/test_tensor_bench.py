"""Runs the benchmark of ranks on a tiny model, which shows only that the benchmark runs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suite.engine import tensor

pytestmark = pytest.mark.long


def test_each_row_has_the_three_times_and_the_share_of_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = torch.get_num_threads()
    for name, value in (("PROMPTS_TOKENS", (70,)), ("BATCHES", (2,)), ("DECODE_STEPS", 2)):
        monkeypatch.setattr(tensor, name, value)
    said: list[str] = []
    model = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300"
    try:
        found = tensor.bench_tensor(model, 2, 1, said.append)
    finally:
        torch.set_num_threads(threads)
    assert [(row["kind"], row["size"]) for row in found["rows"]] == [("prompt", 70), ("decodes", 2)]
    for row in found["rows"]:
        assert row["speed_up"] == pytest.approx(row["one_process_s"] / row["ranks_s"])
        assert 0.0 < row["share_of_sums"] < 1.0
    assert found["ops"].endswith(", 2 ranks") and len(said) == 2
