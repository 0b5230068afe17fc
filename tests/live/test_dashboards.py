"""The dashboard and the alert rules name exported metrics, and promtool accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "moonpool.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "moonpool.json"
METRIC = re.compile(r"\b(?:vllm|moonpool):\w+")
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def exported(http: httpx.Client) -> set[str]:
    """Every metric of the server, with the names that Prometheus derives from histograms."""
    found = re.findall(r"^# TYPE (\S+) (\w+)$", http.get("/metrics").text, re.M)
    names = {name for name, _ in found}
    return names | {f"{name}_bucket" for name, kind in found if kind == "histogram"}


def test_every_metric_that_they_name_is_exported(http: httpx.Client) -> None:
    known = exported(http)
    named = set(METRIC.findall(" ".join([*expressions(), RULES.read_text()])))
    assert len(named) >= 30
    assert named <= known, sorted(named - known)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def check_rules(path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is absent: install Debian's prometheus package")
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    check_rules(RULES)


def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, query in enumerate(expressions()):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        rules.append({"record": f"panel:{number}", "expr": query})
    assert len(rules) >= 40
    path = tmp_path / "queries.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    check_rules(path)
