"""The dashboard and the alert rules name only exported metrics, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "moonpool.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "moonpool.json"
METRIC = re.compile(r"\b(?:vllm|moonpool):\w+")
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$job": ".*"}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def exported(http: httpx.Client) -> set[str]:
    """Returns every metric of the server, with the names that Prometheus derives from
    histograms."""
    found = re.findall(r"^# TYPE (\S+) (\w+)$", http.get("/metrics").text, re.M)
    names = {name for name, _ in found}
    return names | {f"{name}_bucket" for name, kind in found if kind == "histogram"}


def test_every_metric_that_they_name_is_exported(http: httpx.Client) -> None:
    known = exported(http)
    named = set(METRIC.findall(" ".join([*expressions(), RULES.read_text()])))
    assert len(named) >= 30
    assert named <= known, sorted(named - known)


def unknown_to_grafana(dashboard: Any) -> list[str]:
    """Returns paths of fields that Grafana's model of a dashboard drops or changes when Grafana
    reads and writes the dashboard."""
    register_default_plugins()
    written = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    return differences(dashboard, written, "")


def differences(given: Any, written: Any, path: str) -> list[str]:
    if isinstance(given, dict) and isinstance(written, dict):
        found = [f"{path}/{name}" for name in given if name not in written]
        for name in given.keys() & written.keys():
            found += differences(given[name], written[name], f"{path}/{name}")
        return found
    if isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        pairs = enumerate(zip(given, written, strict=True))
        return [each for i, pair in pairs for each in differences(*pair, f"{path}/{i}")]
    return [] if given == written else [path]


def test_grafanas_model_knows_every_field_of_the_dashboard() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert not unknown_to_grafana(dashboard)
    panel = next(one for one in dashboard["panels"] if one.get("targets"))
    panel["targets"][0]["exprr"] = panel["fieldConfig"]["defaults"]["unitt"] = "s"
    assert {path.rpartition("/")[2] for path in unknown_to_grafana(dashboard)} == {"exprr", "unitt"}


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
    path = tmp_path / "queries.yml"  # a YAML file may contain JSON
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    check_rules(path)


ALERTS: list[tuple[str, dict[str, str], set[str]]] = [
    ("nothing happens", {}, set()),
    (
        "the last decode instance is lost",
        {'moonpool:instances{role="decode"}': "1 0x9"},
        {"NoInstanceOfARole"},
    ),
    ("a damaged slice", {"moonpool:corrupt_slices_total": "0 0 1x9"}, {"DamagedBlocks"}),
    ("a head that begins again at 0", {"moonpool:corrupt_slices_total": "0x10"}, set()),
    ("a damaged disk", {"moonpool:damaged_ssd_blocks_total": "0 3x9"}, {"DamagedSsdBlocks"}),
    ("a failed read", {"moonpool:ssd_failures_total": "0 1x9"}, {"DiskFails"}),
    (
        "a lost instance",
        {'moonpool:instance_losses_total{instance_id="decode-0"}': "0 1x9"},
        {"LosesInstances"},
    ),
    ("a picker that is gone", {'up{job="moonpool-epp"}': "0x10"}, {"PickerDown"}),
    ("a head that died", {"moonpool:head_restarts_total": "0 1x9"}, {"HeadRestarts"}),
    (
        "departed clients",
        {'moonpool:requests_failed_total{reason="abort"}': "0+30x10"},
        set(),
    ),
    (
        "failures",
        {'moonpool:requests_failed_total{reason="deadline"}': "0+30x10"},
        {"RequestsFail"},
    ),
]
AT_REST = {
    'up{job="moonpool"}': "1x10",
    'moonpool:instances{role="prefill"}': "1x10",
    'moonpool:instances{role="decode"}': "1x10",
    'moonpool:instances{role="mixed"}': "0x10",
}
"""Holds values per minute of a cluster of one prefill and one decode instance."""


@pytest.mark.parametrize("case", ALERTS, ids=[name for name, _, _ in ALERTS])
def test_alerts_fire_when_they_should_and_only_then(
    case: tuple[str, dict[str, str], set[str]], tmp_path: Path
) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is absent: install Debian's prometheus package")
    _, series, fires = case
    names = re.findall(r"alert: Moonpool(\w+)", RULES.read_text())
    assert fires <= set(names)
    labels: dict[str, dict[str, str]] = {
        "PickerDown": {"job": "moonpool-epp"},
        "LosesInstances": {"instance_id": "decode-0"},
        "RequestsFail": {"reason": "deadline"},
    }
    severities = dict(
        re.findall(r"alert: Moonpool(\w+)\n(?:.*\n)*?.*severity: (\w+)", RULES.read_text())
    )
    tests = [
        {
            "eval_time": "9m",
            "alertname": f"Moonpool{name}",
            "exp_alerts": [{"exp_labels": {"severity": severities[name], **labels.get(name, {})}}]
            if name in fires
            else [],
        }
        for name in names
    ]
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values}
                    for name, values in (AT_REST | series).items()
                ],
                "alert_rule_test": tests,
            }
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps(content))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    wrong = set(re.findall(r"alertname: Moonpool(\w+)", told))
    # Annotations contain values, so only these may differ in an alert that should fire.
    assert wrong == fires, told
    for name in fires:
        assert re.search(rf'got:\[.*alertname="Moonpool{name}"', told.replace("\n", " ")), told
