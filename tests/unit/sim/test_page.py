"""Tests the report page: well-formed, self-contained, in agreement with the figures,
reproducible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moonpool.conductor.waiting.rules import LOAD_REASONS
from moonpool.config.parse import parse_config
from moonpool.pages.units import byte_size, duration, percent, significant
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.report.page import render_report
from moonpool.sim.report.user_figures import REASONS
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys

VOID = {"meta", "br", "hr", "img", "link", "input"}
BLOCK = 256


class Outline(HTMLParser):
    """Checks that tags nest; keeps the tags with their attributes and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "title"):
            self.words.append(data)


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


def arrivals(number: int, gap_s: float) -> list[Arrival]:
    shared = private_keys(0, 2048, BLOCK)
    made = []
    for n in range(number):
        tokens = 3000 + 617 * (n % 23)
        keys = (*shared, *private_keys(n, tokens, BLOCK)[len(shared) :])
        made.append(Arrival(n * gap_s, tokens, 2 + (37 * n) % 150, keys))
    return made


def simulated(
    number: int = 150, gap_s: float = 0.4, **overrides: dict[str, Any]
) -> tuple[Simulation, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {"cluster": {"prefill": 2, "decode": 2}}
    config = parse_config("", tables | overrides, DEFAULTS)
    simulation = Simulation(config, build_hardware(config))
    simulation.run(arrivals(number, gap_s))
    return simulation, summarise(simulation, 1.0)


def drawn(simulation: Simulation, figures: dict[str, Any]) -> str:
    return render_report(simulation, figures, "moonpool simulate t.jsonl", "t.jsonl")


def lead_of(page: str) -> str:
    found = re.search(r'<p class="lead">(.*?)</p>', page)
    assert found is not None
    return unescape(found[1]).replace("\xa0", " ")


@cache
def ordinary() -> tuple[Simulation, dict[str, Any], str]:
    simulation, figures = simulated()
    return simulation, figures, drawn(simulation, figures)


@cache
def overloaded() -> tuple[Simulation, dict[str, Any], str]:
    """Returns a simulation with a tight limit, in which some requests are refused."""
    simulation, figures = simulated(gap_s=0.1, slo={"ttft_s": 3.0})
    return simulation, figures, drawn(simulation, figures)


@pytest.mark.parametrize("made", [ordinary, overloaded])
def test_tags_nest_and_every_drawing_is_xml(made: Any) -> None:
    page = made()[2]
    found = outline(page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) >= 10
    for text in drawings:
        root = ElementTree.fromstring(text)
        _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
        assert root.attrib["aria-label"]
        for child in root.iter():
            for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                if name in child.attrib:
                    assert 0 <= float(child.attrib[name]) <= most, (child.tag, child.attrib)
    assert sum(tag == "figure" for tag, _ in found.tags) >= 14
    assert "nan" not in page and "NaN" not in page


def test_nothing_is_loaded_or_run() -> None:
    page = ordinary()[2]
    for tag, attributes in outline(page).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "use")
        for name in attributes:
            assert not name.startswith("on") and name not in ("src", "href", "style", "xlink:href")
    assert "url(" not in page and "@import" not in page and "://" not in page
    assert "default-src 'none'" in page
    assert len(page.encode()) < 400_000


@pytest.mark.parametrize("made", [ordinary, overloaded])
def test_the_text_agrees_with_the_figures(made: Any) -> None:
    _, figures, page = made()
    lead = lead_of(page)
    assert lead.startswith("2 prefill + 2 decode instances, each 8 × A800-SXM with llama3-70b,")
    assert "were sent the 150 requests of t.jsonl" in lead
    assert percent(figures["effective_share"]).replace("\xa0", " ") in lead
    assert "TTFT ≤ " in lead and "TBT ≤ 100 ms" in lead
    text = "".join(outline(page).words)
    for words in (
        duration(figures["ttft_s"]["p50"]),
        duration(figures["ttft_s"]["p99"]),
        duration(figures["tbt_top10_mean_s"]["p50"]),
        percent(figures["cache"]["hit_ratio"]),
        f"{figures['cache']['input_tokens']:,} prompt tokens",
        f"{figures['effective']:,} requests",
        f"{figures['bubbles']['count']:,} in all",
        byte_size(figures["transfer"]["bytes"]),
        duration(figures["stages_s"]["decode"]),
        duration(figures["predicted_ttft_error_s"]["mean_absolute"]),
        duration(figures["prefill_compute_s"]["mean"]),
        "moonpool simulate t.jsonl",
    ):
        assert words in text, words
    assert '"goodput_rps"' in text and "wall_s" not in text


def test_refusals_are_counted_by_reason() -> None:
    _, figures, page = overloaded()
    assert figures["rejected"] > 5
    assert f"{figures['rejected']:,} were refused." in lead_of(page)
    for reason, number in figures["rejected_by_reason"].items():
        assert f">{reason}</text>" in page
        assert f">{number:,} ({percent(number / figures['rejected'])})</text>" in page


def test_a_run_without_refusals() -> None:
    _, figures, page = ordinary()
    assert figures["rejected"] == figures["failed"] == 0
    assert "All were answered" in lead_of(page) and "none was refused." in lead_of(page)


def test_the_limits_are_drawn_where_they_are() -> None:
    simulation, _, page = ordinary()
    kept = percent(simulation.collector.ttft_s.share_up_to(simulation.config.slo.ttft_s))
    assert f"SLO 30\xa0s: {kept}" in page
    assert "SLO 100\xa0ms: " in page


@pytest.mark.parametrize(
    ("conductor", "words"),
    [
        ({"admission": "goodput"}, "limit, not enforced: 1"),
        ({"admission": "goodput", "decode_wait": False}, "refuses above 1"),
        ({"admission": "none", "decode_wait": False}, "limit, not enforced: 1"),
        ({"admission": "early"}, "refuses above 1"),
    ],
)
def test_the_limit_of_the_load_refuses_only_where_it_is_compared(
    conductor: dict[str, Any], words: str
) -> None:
    page = drawn(*simulated(2, conductor=conductor))
    assert words in page.replace("\xa0", " ")


def test_each_refusal_under_load_has_an_explanation() -> None:
    assert REASONS.keys() >= LOAD_REASONS


def test_what_comes_from_outside_is_escaped() -> None:
    simulation, figures, _ = ordinary()
    hostile = "<script>alert('&\"x\"')</script>"
    mended = figures | {"rejected": 3, "rejected_by_reason": {hostile: 3}}
    page = render_report(simulation, mended, f"moonpool {hostile}", hostile)
    found = outline(page)
    assert "script" not in [tag for tag, _ in found.tags]
    assert "".join(found.words).count(hostile) >= 4
    for text in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(text)


def test_secrets_of_the_configuration_stay_out() -> None:
    simulation, figures = simulated(3, api={"api_keys": ["hush-hush"]})
    assert "hush-hush" not in drawn(simulation, figures)


def test_changed_settings_stand_out() -> None:
    page = ordinary()[2]
    assert "<dt>prefill</dt><dd><b>2</b></dd>" in page  # differs from the default of 8
    assert "<dt>block_tokens</dt><dd>256</dd>" in page
    assert "seed <b>0</b>" in page
    assert "<dt>threads</dt>" not in page  # left out, because a simulation does not read it


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("77", marks=pytest.mark.long)])
def test_the_same_run_gives_the_same_bytes(hash_seed: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_page as t; "
        "s, f = t.simulated(); f['wall_s'] = 99.0; sys.stdout.write(t.drawn(s, f))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"},
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.decode() == ordinary()[2]


def test_no_request_at_all() -> None:
    simulation, figures = simulated(0)
    page = drawn(simulation, figures)
    outline(page)
    assert lead_of(page).endswith("no request at all: t.jsonl has none.")


def test_all_refused() -> None:
    simulation, figures = simulated(20, slo={"ttft_s": 0.001})
    assert figures["completed"] == 0 and figures["rejected"] == 20
    page = drawn(simulation, figures)
    outline(page)
    assert "None was answered" in lead_of(page) and "20 were refused." in lead_of(page)
    assert page.count("No request was answered.") >= 4


def test_one_request_on_one_mixed_instance() -> None:
    simulation, figures = simulated(1, cluster={"prefill": 0, "decode": 0, "mixed": 1})
    page = drawn(simulation, figures)
    outline(page)
    assert lead_of(page).startswith(
        "1 mixed instance, 8 × A800-SXM with llama3-70b, was sent the 1 request of t.jsonl"
    )
    assert "On all mixed instances" in page


def test_more_instances_than_strips() -> None:
    simulation, figures = simulated(40, cluster={"prefill": 40, "decode": 3})
    page = drawn(simulation, figures)
    assert "The first 32 of 43;" in page
    assert len(re.findall(r"<title>prefill-\d+: computed", page)) == 32
    assert len(page.encode()) < 400_000


def notes_of(page: str) -> list[str]:
    return [unescape(note) for note in re.findall(r'<p class="note">(.*?)</p>', page)]


def test_the_price_is_a_figure_where_there_is_one() -> None:
    simulation, figures, page = ordinary()
    assert "price in USD" not in page
    hours = sum(figures["instance_hours"].values())
    page = drawn(simulation, figures | {"usd": 96.0})
    (value, remark) = re.findall(r"<dt>price in USD</dt><dd>([^<]*)<small>([^<]*)</small>", page)[0]
    assert value == "96.00" and remark.endswith(" per 1,000 within both SLOs")
    assert float(remark.split()[0]) == pytest.approx(96_000 / figures["effective"], rel=0.01)
    page = drawn(simulation, figures | {"usd": 96.0, "effective": 0})
    assert f"<small>{significant(hours)} instance hours</small>" in page


def test_what_the_figures_cannot_say_is_said() -> None:
    simulation, figures, page = ordinary()
    assert notes_of(drawn(simulation, figures | {"cost_domain": None})) == []
    domain = figures["cost_domain"] | {"outside_prefill_share": 0.93, "outside_decode_share": 0.0}
    page = drawn(simulation, figures | {"cost_domain": domain, "trace_has_hashes": False})
    outside, hashes = notes_of(page)
    assert "93% of computed prompt tokens and 0% of generated ones lie outside" in outside
    assert "has no block hashes, so it cannot show which prompts share a prefix" in hashes
    assert (
        notes_of(drawn(simulation, figures | {"cost_domain": None, "trace_has_hashes": True})) == []
    )
