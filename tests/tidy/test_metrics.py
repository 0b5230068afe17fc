"""Tests that the page of the metrics equals the code, and lists every reason why a request ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from moonpool.api.metrics.catalogue import CATALOGUE, HISTOGRAMS, OF_ENGINES, catalogue_table
from moonpool.api.metrics.labels import FAILURES, REFUSALS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "watching.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
MARK = "<!-- metrics: python -m moonpool.api.metrics.catalogue -->"
NAME = re.compile(r"\b(?:vllm|moonpool):[a-z][a-z0-9_]+")
REASON = re.compile(
    r"""(?:RequestRefused|Rejection)\(\s*\d+,\s*"(\w+)" # where it is made
    | \.fail\(\s*\w+,\s*"(\w+)"
    | "(too_many_\w+)"
    | self\._retry\(\s*tracked,\s*503,\s*"(\w+)"
    | ^(?:TBT_SLO_LATE|TTFT_SLO_LATE|FAIR_SHARE|REFUSED|LONG_QUEUE)\s=\s"(\w+)"
    | ^(?:PROGRAMS_WAIT|NO_ROOM|BATCH_FULL|POLICY)\s=\s"(\w+)"
    | ^(?:POLICY_ERROR|RATE_LIMIT|INSTANCES_ENDED)\s=\s"(\w+)"
    | ^(?:TIGHT_TTFT,\sTIGHT_TBT|OUT_OF_PREFILL,\sOUT_OF_DECODE)\s=\s"(\w+)",\s"(\w+)"
    """,
    re.X | re.M,
)
NO_END = {"tbt_slo", "aborted", "too_many_viewers"}
"""Reasons that never end a request: a retry or an abort follows, which has a reason of its own. A
refusal of the live page refuses no request."""


def reasons() -> Iterator[str]:
    for path in sorted((ROOT / "src" / "moonpool").rglob("*.py")):
        for found in REASON.finditer(path.read_text()):
            yield from filter(None, found.groups())


def test_the_page_has_the_table_of_the_code() -> None:
    _, table, _ = PAGE.read_text().split(MARK)
    text = f"write what `{MARK.split(': ')[1][:-4]}` prints between the marks"
    assert table.strip() == catalogue_table(), text


def test_every_reason_has_its_series_from_the_start() -> None:
    found = set(reasons())
    assert len(found) >= 30, "the pattern finds them no more"
    assert not found - NO_END - {*REFUSALS, *FAILURES}


def test_the_page_of_troubles_explains_each_code() -> None:
    table = TROUBLES.read_text().split("## By the code of a refusal")[1]
    first_cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    explained = set(re.findall(r"`(\w+)`", "".join(first_cells)))
    seen_by_nobody = {"abort"}  # the client left
    assert not {*REFUSALS, *FAILURES, "aborted"} - seen_by_nobody - explained


def test_every_metric_that_a_page_or_a_dashboard_names_exists() -> None:
    exported = {spec.exported_name for spec in (*CATALOGUE, *OF_ENGINES)}
    exported |= {
        f"{spec.name}{suffix}" for spec in HISTOGRAMS for suffix in ("_bucket", "_sum", "_count")
    }
    # a page may name a counter without `_total`
    families = {spec.name for spec in (*CATALOGUE, *OF_ENGINES)}
    dashboard = json.dumps(json.loads((ROOT / "deploy/grafana/moonpool.json").read_text()))
    rules = (ROOT / "deploy/prometheus/moonpool.rules.yml").read_text()
    assert set(NAME.findall(dashboard)) | set(NAME.findall(rules)) <= exported
    lines = [
        line
        for path in (ROOT / "docs").glob("*.md")
        for line in path.read_text().splitlines()
        if "not served" not in line
    ]
    assert set(NAME.findall("\n".join(lines))) <= exported | families


def test_every_series_of_a_rule_is_there_before_its_first_event() -> None:
    """All label values must exist from the start. Otherwise a series would begin at 1, and its
    `increase` would be 0."""
    rules = (ROOT / "deploy/prometheus/moonpool.rules.yml").read_text()
    by_name = {spec.exported_name: spec for spec in CATALOGUE}
    for name in set(re.findall(r"(?:increase|rate)\((\S+?)(?:\{[^}]*\})?\[", rules)):
        spec = by_name.get(name)
        assert spec is None or not spec.label or spec.known or spec.label == "instance_id", name


def test_every_counter_has_a_test_of_its_event() -> None:
    tests = ROOT / "tests"
    paths = [*(tests / "unit" / "runtime").glob("*.py"), *(tests / "live").glob("test_*.py")]
    text = "\n".join(path.read_text() for path in paths)
    specs = (*CATALOGUE, *OF_ENGINES)
    untested = [spec.name for spec in specs if spec.kind != "gauge" and spec.name not in text]
    assert not untested
