"""Tests the stored runs of a plan's page: their loads, their verdicts, and the page itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import msgspec
import pytest

import moonpool
from moonpool.plan.latency_table import MULTIPLES, ClassOutcome, LatencyTable
from moonpool.plan.stored_runs import SPEEDS, with_room
from moonpool.plan.time_left import TimeLeft, time_words
from moonpool.request_record import RequestRecord
from moonpool.sim.report.page import environment
from moonpool.sim.report.plots import ReportFigure, Table
from moonpool.types import RequestId, Slo

ROWS = [moonpool.TraceRow(0.5 * i, 6144, 30) for i in range(40)]
OWN = MULTIPLES.index(1.0)


def record(ttft_s: float, slo: Slo) -> RequestRecord:
    found = RequestRecord(RequestId("r"), 10, slo, arrived_s=0.0, outcome="stop")
    found.first_token_s = ttft_s
    return found


def test_a_run_is_judged_by_other_levels_as_it_was_by_its_own() -> None:
    slo, table = Slo(2.0, 0.1), LatencyTable()
    for ttft_s in (0.1, 0.9, 1.0, 2.0, 2.1, 3.9, 99.0):
        table.add(record(ttft_s, slo), "", answered=True)
    table.add(record(0.1, slo), "", answered=False)
    (found,) = table.classes()
    assert found.num_requests == 8
    within = {multiple: found.num_within(i, OWN) for i, multiple in enumerate(MULTIPLES)}
    assert (within[0.5], within[1.0], within[1.25], within[2.0], within[5.0]) == (3, 4, 5, 6, 6)
    assert found.num_within(OWN, OWN) == 4


@pytest.fixture(scope="module")
def plan() -> moonpool.PlanResult:
    return moonpool.plan_cluster(
        moonpool.TraceRows(ROWS),
        slo_ttft_s=6,
        slo_tbt_s=0.1,
        layout="colocated",
        seeds=2,
        what_if=True,
        config={"slo": {"classes": [{"name": "</script><!--<script>", "ttft_s": 6, "tbt_s": 0.1}]}},
    )


def test_the_page_answers_from_runs_at_each_load(plan: moonpool.PlanResult) -> None:
    page = plan.html("moonpool plan --trace <own>")
    (text,) = re.findall(r'<script type="application/json" id="runs">(.*?)</script>', page, re.S)
    assert "<" not in text, "a name could end the script"
    data = json.loads(text)
    assert sum(cluster["chosen"] for cluster in data["clusters"]) == 1
    for cluster in data["clusters"]:
        assert [run["load"] for run in cluster["runs"]] == list(SPEEDS)
    (chosen,) = [cluster for cluster in data["clusters"] if cluster["chosen"]]
    (same,) = [run for run in chosen["runs"] if run["load"] == 1.0]
    one = ClassOutcome("", same["classes"][0]["requests"], 0, same["classes"][0]["times"])
    share = plan.summary["choice"]["share"]
    assert round(one.num_within(OWN, OWN) / one.num_requests, 6) == share
    assert one.num_within(0, OWN) <= one.num_within(OWN, OWN)
    assert "USD a month" in page and "A800-SXM costs " in page and "no block hashes" in page
    assert "&lt;own&gt;" in page and "<own>" not in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "it loads from elsewhere"
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1 and f"script-src 'sha256-{digest}'" in page
    loads = {row["load"] for row in plan.runs}
    assert loads == set(SPEEDS)


def test_the_answer_names_the_load_at_which_a_stored_run_breaks_first(
    plan: moonpool.PlanResult,
) -> None:
    search = plan.search
    found, wanted = msgspec.structs.replace(search.found, rooms=()), 0.9
    (room,) = with_room(found, search.stored, wanted).rooms
    own = {
        run.speed: run.outcome.share
        for run in search.stored
        if run.candidate == found.choice.candidate and run.speed >= 1.0
    }
    assert all(share >= wanted for speed, share in own.items() if speed <= room.kept)
    if room.missed is None:
        assert room.kept == max(own)
    else:
        assert own[room.missed] < wanted
    assert with_room(found, (), wanted) is found
    assert with_room(search.found, search.stored, 2.0).rooms, "the search's own stay"


def test_tables_and_figures_of_a_page_can_be_scrolled_by_keyboard() -> None:
    table = Table(("", "price", "share"), [("a", "1", "2")])
    figure = ReportFigure("Title", "How.", table=table, wide=True)
    template = environment("moonpool.plan").from_string(
        '{% from "macros.html.jinja" import figure_of %}{{ figure_of(figure) }}'
    )
    html = template.render(figure=figure)
    assert html.count('tabindex="0"') == 2 and 'aria-label="Table of price, share"' in html
    assert "<td></td>" in html and '<th scope="col"></th>' not in html


def test_time_left_falls_stage_by_stage() -> None:
    left = TimeLeft()
    assert left.seconds(0, 5.0) is None and time_words(None) == ""
    first = left.runs(1)
    left.begin("draws of the trace", 20)
    assert left.runs(21) < first
    left.begin("neighbours", 40)
    assert left.runs(90) == 1.0 and left.seconds(90, 180.0) == 2.0
    assert time_words(2.0) == "about 5 s left" and time_words(200) == "about 3 min left"
