"""Tests SLO classes, which rows name and of which the configuration has the levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moonpool
from moonpool.config.parse import parse_config, write_toml
from moonpool.config.tables import ConfigError
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from tests.cli_runner import invoke, succeed

FILE = """
[slo]
ttft_s = 30.0
tbt_s = 0.1
[[slo.classes]]
name = "chat"
ttft_s = 2.0
tbt_s = 0.1
[[slo.classes]]
name = "never"
ttft_s = 0.001
tbt_s = 0.1
"""


def rows() -> list[TraceRow]:
    """Makes rows: a third has no class, a third names a class, and a third has a tenant with a
    class."""
    named = ({}, {"slo_class": "chat", "tenant": "never"}, {"tenant": "never"})
    return [TraceRow(2.0 * i, 4000, 20, **named[i % 3]) for i in range(30)]  # type: ignore[arg-type]


def test_a_trace_file_keeps_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(rows(), path)
    read = list(moonpool.read_trace(path))
    assert [row.slo_class for row in read] == [row.slo_class for row in rows()]
    (tmp_path / "bad.jsonl").write_text(path.read_text().replace('"chat"', "7"))
    with pytest.raises(ValueError, match="slo_class is 7; it must be a name"):
        moonpool.read_trace(tmp_path / "bad.jsonl")
    log = {"time": "2026-01-01T00:00:00Z", "prompt_tokens": 5, "completion_tokens": 2}
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(log | {'slo_class': 'chat'})}\n" * 2)
    assert [row.slo_class for row in moonpool.read_trace(tmp_path / "log.jsonl")] == ["chat"] * 2


def test_each_class_is_held_to_its_own_levels(tmp_path: Path) -> None:
    trace, config, figures = (tmp_path / name for name in ("t.jsonl", "c.toml", "f.json"))
    write_trace(rows(), trace)
    config.write_text(FILE)
    page = tmp_path / "page.html"
    line = ["simulate", "--trace", str(trace), "--mixed", "1", "--config", str(config)]
    done = succeed(*line, "--json", figures, "--report", page)
    found = json.loads(figures.read_bytes())
    classes = found["slo_classes"]
    assert {name: one["requests"] for name, one in classes.items()} == {"chat": 10, "never": 10}
    assert classes["chat"]["effective"] == 10 and classes["never"]["effective"] == 0
    assert found["effective"] == 20
    assert "chat: 10 of 10 (100.0%) within its SLOs" in done.output
    assert "Classes of requests" in page.read_text()
    by_flags = [*line[:-2], "--slo-class", "chat=2,0.1", "--slo-class", "never=0.001,0.1"]
    done = succeed(*by_flags, "--json", tmp_path / "g.json")
    assert json.loads((tmp_path / "g.json").read_bytes())["slo_classes"] == classes


@pytest.mark.long
def test_a_plan_keeps_the_levels_of_every_class() -> None:
    """90 % of all requests would keep their SLOs on one instance, but the small class needs a
    second one."""
    base = {"slo": {"ttft_s": 60.0, "tbt_s": 0.5}}
    own = {"slo": base["slo"] | {"classes": [{"name": "chat", "ttft_s": 0.8, "tbt_s": 0.5}]}}
    few = [TraceRow(0.5 * i, 6144, 4, slo_class="chat" if i % 20 == 19 else "") for i in range(80)]
    trace = moonpool.TraceRows(few)
    plans = [
        moonpool.plan_cluster(trace, config=config, layout="colocated", seeds=2, runs=20)
        for config in (base, own)
    ]
    without, with_class = (plan.summary["choice"] for plan in plans)
    assert with_class["usd_per_h"] > without["usd_per_h"]
    assert with_class["classes"]["chat"] >= 0.9
    assert with_class["share"] == min(with_class["classes"].values())
    assert "of class chat, within 0.8 s" in plans[1].advice


def test_wrong_classes_are_one_line() -> None:
    config = parse_config(FILE)
    assert parse_config(write_toml(config)) == config
    for text, says in (
        (FILE.replace("never", "chat"), "slo.classes must be of different names"),
        (FILE.replace("0.001", "-1"), "slo.classes"),
        (FILE.replace('name = "never"', ""), "slo.classes"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_config(text)
    done = invoke("simulate", "--trace", "t", "--slo-class", "chat")
    assert done.exit_code == 2 and "must be NAME=TTFT,TBT in seconds" in done.output
