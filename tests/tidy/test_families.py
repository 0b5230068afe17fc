"""Tests that a family is described by one short table alone: the model and its operations do not
name families."""

from __future__ import annotations

import re

from benchmarks.house import PACKAGES
from moonpool_engine.engine.families.registry import FAMILIES

SRC = PACKAGES["moonpool_engine"]
COMPUTES = [
    *(SRC / "engine" / f"{name}.py" for name in (
        "model", "layers", "attention", "mlp", "routing", "packing", "ops", "reference", "runner",
        "step", "sampler", "staggered",
    )),
    *(SRC / "engine" / "parallel").glob("*.py"),
    *(SRC / "engine" / "native").glob("*.py"),
    *(SRC / "engine" / "cuda").glob("*.py"),
    *(SRC / "attention_offload").rglob("*.py"),
]  # fmt: skip


def test_descriptions_are_files_of_100_lines() -> None:
    for name in ("dense", "mixtures"):
        path = SRC / "engine" / "families" / f"{name}.py"
        assert len(path.read_text().splitlines()) <= 100


def test_what_computes_a_model_asks_for_no_family() -> None:
    names = "|".join(re.escape(name) for name in FAMILIES)
    asks = re.compile(rf"spec\.family\b|engine\.families|[\"']({names})[\"']")
    for path in COMPUTES:
        for line in path.read_text().splitlines():
            assert not asks.search(line), f"{path.name}: {line.strip()}"
