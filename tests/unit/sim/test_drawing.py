"""Tests the chart module: axes, series, numbers as text, and SVG."""

from __future__ import annotations

import re
from importlib import resources
from itertools import pairwise
from math import inf
from xml.etree import ElementTree

import pytest

from moonpool.pages import look
from moonpool.pages.chart import (
    HeatRow,
    Plot,
    bars,
    count_axis,
    heat_map,
    latency_axis,
    share_axis,
    time_axis,
)
from moonpool.pages.units import byte_size, counted, duration, joined, percent, significant
from moonpool.sim.report.plots import busy_shares, rates, thinned, values_at, window_edges


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (12031.0, "12,031"),
        (15.34, "15.3"),
        (999.6, "1,000"),
        (0.02917, "0.0292"),
        (-1.5, "-1.5"),
        (inf, "unlimited"),
    ],
)
def test_significant(value: float, words: str) -> None:
    assert significant(value, 5 if value > 1e4 else 3) == words


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0 %"), (1, "100 %"), (0.9999, "over 99.9 %"), (1e-5, "under 0.1 %"), (0.9825, "98.2 %")],
)
def test_percent_never_hides_the_last_one(share: float, words: str) -> None:
    assert percent(share).replace("\xa0", " ") == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0 s"), (31e-6, "31 µs"), (0.0314, "31.4 ms"), (0.9999, "1 s"), (29.5, "29.5 s")),
        *((3540, "59 min"), (86400, "24 h"), (-0.002, "-2 ms")),
    ],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds).replace("\xa0", " ") == words


def test_sizes_and_lists() -> None:
    assert byte_size(39.5e12) == "39.5\xa0TB" and byte_size(12) == "12\xa0B"
    assert counted(1, "request") == "1 request" and counted(2000, "request") == "2,000 requests"
    assert joined(["a"]) == "a" and joined(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize("high", [0.0, 1e-6, 0.7, 1.0, 4.9, 17, 99, 1e9])
def test_count_axis_ends_at_or_above(high: float) -> None:
    axis = count_axis(high, "things")
    assert axis.high >= high and axis.low == 0
    assert 2 <= len(axis.ticks) <= 7
    assert axis.place(0) == 0 and axis.place(axis.high) == 1


@pytest.mark.parametrize(
    ("span_s", "unit"),
    [(0.0, "s"), (40, "s"), (330, "min"), (170, "s"), (3600, "min"), (40_000, "h")],
)
def test_time_axis_has_few_labels_in_one_unit(span_s: float, unit: str) -> None:
    axis = time_axis(span_s)
    assert axis.unit == f"simulated time ({unit})"
    assert 1 <= len(axis.ticks) <= 12
    assert all(0 <= at_s <= axis.high for at_s, _ in axis.ticks)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0.02, 0.3), (1e-7, 40), (5, 5), (0.1, 0.10001)])
def test_latency_axis_holds_both_ends(low: float, high: float) -> None:
    axis = latency_axis(low, high)
    assert 0 < axis.low < axis.high and axis.high >= high
    assert any(label for _, label in axis.ticks)
    assert axis.place(axis.low) == 0 and axis.place(axis.high) == 1 and axis.place(-1) == 0


def test_windows_are_round_and_cover_the_span() -> None:
    points = [(5.0 * n, float(n)) for n in range(721)]
    edges = window_edges(points, 120)
    assert edges[0] == 0 and edges[-1] == 3600 and len(edges) == 121
    assert edges[1] == 30
    uneven = window_edges([(5.0 * n, 0.0) for n in range(700)], 120)
    assert uneven[-1] == 3495 and all(b > a for a, b in pairwise(uneven))
    assert window_edges([(0.0, 1.0)], 10) == [0.0, 1.0]


def test_rates_add_up_to_the_count() -> None:
    points = [(0.0, 0.0), (5.0, 10.0), (10.0, 10.0), (20.0, 70.0)]
    edges = [0.0, 4.0, 10.0, 20.0]
    found = rates(points, edges)
    assert [rate for _, rate in found] == [2.0, pytest.approx(2 / 6), 6.0]
    widths = [4.0, 6.0, 10.0]
    assert sum(r * w for (_, r), w in zip(found, widths, strict=True)) == pytest.approx(70)
    assert values_at(points, [15.0]) == [40.0]


def test_busy_time_counted_late_is_put_where_it_was() -> None:
    points = [(0.0, 0.0), (5.0, 0.0), (10.0, 8.0), (15.0, 13.0), (20.0, 13.0)]
    shares = busy_shares(points, [0.0, 5.0, 10.0, 15.0, 20.0])
    assert shares == pytest.approx((0.6, 1.0, 1.0, 0.0))
    assert sum(shares) * 5 == pytest.approx(13)


def test_thinned_keeps_the_mean_and_drops_the_infinite() -> None:
    points = [(float(n), float(n % 7)) for n in range(1000)]
    few = thinned([*points, (1000.0, inf)], 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thinned(points, 1000) == points


def test_a_plot_puts_points_where_they_belong() -> None:
    plot = Plot(count_axis(10, "x"), share_axis("y"))
    plot.line([(0, 0), (10, 1)], "c1")
    root = ElementTree.fromstring(plot.svg("a < b"))
    assert root.attrib["aria-label"] == "a < b"
    line = next(e for e in root if e.attrib.get("class") == "line c1")
    places = [float(n) for n in re.findall(r"[\d.]+", line.attrib["d"])]
    assert places == [plot.at_x(0), plot.at_y(0), plot.at_x(10), plot.at_y(1)]
    assert plot.at_x(10) > plot.at_x(0) and plot.at_y(1) < plot.at_y(0)


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(bars([("a", 4, "4", "c1"), ("b", 1, "1", "c2")], "bars"))
    widths = [float(e.attrib["width"]) for e in root if e.tag == "rect"]
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    ElementTree.fromstring(bars([("none", 0, "0", "c1")], "bars"))


def test_strips_join_equal_cells_and_never_show_a_little_as_none() -> None:
    shares = (0.0, 0.0, 1.0, 1.0, 0.01, 0.004)
    edges = [float(n) for n in range(7)]
    text = heat_map([HeatRow("n<0", "g", shares, "34 %", "w&w")], edges, time_axis(6), "strips")
    root = ElementTree.fromstring(text)
    runs = {
        e.attrib["class"]: e.attrib["d"].count("M")
        for e in root.iter("path")
        if e.attrib["class"].startswith("heat")
    }
    assert runs == {"heat h0": 2, "heat h1": 1, "heat h10": 1}


def test_both_charts_use_the_classes_of_the_one_style_sheet() -> None:
    def classes_in(text: str, pattern: str) -> set[str]:
        return {name for found in re.findall(pattern, text) for name in found.split()}

    known = classes_in(look(), r"\.([a-z][\w-]*)")
    script = resources.files("moonpool.pages").joinpath("chart.js").read_text()
    by_script = classes_in(script, r'class: (?:share \? )?"([\w ]+?)(?: c)?"')
    plot = Plot(time_axis(10.0), count_axis(4.0, "requests"))
    plot.line([(0.0, 1.0), (9.0, 2.0)], "c1")
    plot.area([(0.0, 1.0), (9.0, 2.0)], "c1")
    plot.limit_y(3.0, "SLO")
    plot.limit_x(3.0, "SLO")
    plot.mark(1.0, 1.0, "p50", "c2")
    plot.hover([(0.0, 1.0, "text")])
    row = HeatRow("a", "x", [0.0, 0.5], "50 %", "a, half")
    drawn = (
        plot.svg("plot"),
        bars([("a", 1.0, "1", "c3")], "bars"),
        heat_map([row], [0.0, 5.0, 10.0], time_axis(10.0), "heat"),
    )
    by_report = classes_in("".join(drawn), r'class="([\w -]+)"') - {"plot", "bars", "unit"}
    assert {"line", "area", "grid", "bound", "limit"} <= by_script & by_report
    assert by_script | by_report <= known
