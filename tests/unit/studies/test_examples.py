"""Tests that the programs in `examples/` run in the way that their first lines say."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked.commands import LocalServer, run_command

EXAMPLES = Path(__file__).parents[3] / "examples"
MAX_LINES = 45


def run(folder: Path, name: str, *arguments: str) -> str:
    line = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a working directory with the trace that the examples' page makes."""
    folder = tmp_path_factory.mktemp("examples")
    (command,) = re.findall(r"^moonpool (trace .*)$", (EXAMPLES / "README.md").read_text(), re.M)
    run_command(*command.split(), folder=folder, timeout_s=300).check_returncode()
    return folder


def test_the_page_names_every_example() -> None:
    named = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text()))
    assert named == {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb")}
    for name in named:
        if name.endswith(".py"):
            code = [line for line in (EXAMPLES / name).read_text().splitlines() if line.strip()]
            assert len(code) <= MAX_LINES, name


@pytest.mark.long
def test_own_placement(folder: Path) -> None:
    shown = run(folder, "own_placement.py", "trace.jsonl")
    hits = dict(re.findall(r"^(\S+) .* ([\d.]+)% of prompt tokens", shown, re.M))
    assert set(hits) == {"own", "load-balancing", "kvcache-centric"}
    assert len(set(hits.values())) == 3, "each policy places otherwise"
    page = (folder / "placements.html").read_text()
    assert "kvcache-centric" in page and "conductor.placement" in page


@pytest.mark.long
def test_own_eviction(folder: Path) -> None:
    shown = run(folder, "own_eviction.py", "trace.jsonl")
    rows = re.findall(r"oldest first ([\d.]+)%, lru ([\d.]+)%", shown)
    assert len(rows) == 3
    assert any(own != lru for own, lru in rows), "the policy of one's own had no effect"
    assert float(rows[-1][1]) > float(rows[0][1]), "a larger pool hits more"


def test_request_log(folder: Path) -> None:
    shown = run(folder, "request_log.py", str(EXAMPLES / "requests.log"))
    num_lines = len((EXAMPLES / "requests.log").read_text().splitlines())
    refused = (EXAMPLES / "requests.log").read_text().count('"status": 429')
    assert f"{num_lines - refused} requests" in shown
    (hits,) = re.findall(r"(\d+) prompt tokens would come from the cache", shown)
    assert int(hits) > 100
    rows = list(csv.DictReader((folder / "requests.csv").open()))
    assert len(rows) == num_lines - refused
    assert sum(int(row["cached_tokens"]) for row in rows) == int(hits)


@pytest.mark.long
def test_the_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    notebook = json.loads((EXAMPLES / "what_if.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    shares = [run.summary["effective_share"] for run in names["by_speed"].values()]
    assert shares[0] > shares[-1], "a slower trace is served better"
    assert len(names["requests"]) == len(names["trace"])
    assert (folder / "shapes.html").stat().st_size > 5000


@pytest.mark.long
@pytest.mark.live
def test_two_tenants(tmp_path: Path) -> None:
    text = (EXAMPLES / "two_tenants.py").read_text()
    keys = tmp_path / "keys"
    keys.write_text("\n".join(re.findall(r"^    (sk-.*)$", text, re.M)))
    with LocalServer(["--prefill", "1", "--decode", "1", "--api-key-file", str(keys)]) as server:
        shown = run(tmp_path, "two_tenants.py", server.url)
    cached = [int(number) for number in re.findall(r": (\d+) prompt tokens", shown)]
    assert cached[0] == 0 and cached[2] == 0, "a tenant's first request hits nothing"
    assert cached[1] > 0 and cached[3] > 0
    assert "status 401" in shown
