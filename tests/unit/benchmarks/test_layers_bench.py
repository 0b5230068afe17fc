"""Runs `bench layers` on a model so small that its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cli.commands import bench

pytestmark = pytest.mark.long

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=96,vocab=300"


def test_every_way_is_measured_by_both_transports(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = [
        "layers",
        "--model",
        MODEL,
        "--prefix-tokens",
        "640",
        "--new-tokens",
        "32",
    ]
    arguments += ["--prompt-tokens", "128", "--rounds", "2", "--json", str(file)]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    for transport in ("shm", "tcp"):
        load = found[transport]["load"]["640"]
        assert min(load[name] for name in ("compute", "load", "serial", "overlapped")) > 0
        assert load["ratio"] > 0 and len(load["all"]["ratio"]) == 2
        store = found[transport]["store"]["128"]
        assert min(store["none"], store["layer_wise"], store["after"]) > 0
