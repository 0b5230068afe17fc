"""Renders one frame of the live page for a terminal."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moonpool.cli.watch.cluster_events import Frame, time_text
from moonpool.cli.watch.top_pool import TITLE_LINES, WIDE_COLUMNS, new_table, pool_tables
from moonpool.refusal import reason_words

_ROLES = ("prefill", "decode", "mixed")
_TIERS = (("dram", "DRAM"), ("fetched", "fetched"), ("ssd", "SSD"), ("computed", "computed"))
_STAGES = (
    ("placement", "white"),
    ("queue_and_fetch", "yellow"),
    ("prefill", "blue"),
    ("handover", "magenta"),
    ("decode", "green"),
)
_BAR_CELLS = 12
_ANSWERED = ("stop", "length")
_MIN_REQUESTS = 3
_SHORT_ID, _SHORT_STATE, _SHORT_PLACES = 7, 9, 18
"""Most characters of a request's first cells in 80 columns: figures keep their units."""
_FIXED_LINES = 16
"""Lines of the view beside its instances and requests, as laid out below."""
_POOL_FROM_LINES = 34
"""Lines of a terminal from which on hot prefixes and transfers have room."""


def render(frame: Frame, url: str, state: str, columns: int, lines: int | None) -> RenderableType:
    """Returns the view. `state` says what is wrong with the connection, or "" if it is fine.

    `lines` is None for as many lines as the frame needs.
    """
    is_wide = columns >= WIDE_COLUMNS  # whether the panels stand beside each other
    panels = 0 if is_wide else 6
    most = len(frame["requests"])
    if lines is not None:
        most = max(lines - _FIXED_LINES - panels - len(frame["instances"]), _MIN_REQUESTS)
    panels_shown = [_latencies(frame), _refusals(frame)]
    # a wide view has two panels beside each other
    panels_shown.insert(1 if is_wide else 2, _tiers(frame["totals"]["tokens"]))
    pool = pool_tables(frame, None if lines is None else lines - _POOL_FROM_LINES - panels, is_wide)
    if lines is not None:
        most = max(most - sum(table.row_count + TITLE_LINES for table in pool), _MIN_REQUESTS)
    return Group(
        _headline(frame, url, state),
        _instances(frame, is_wide),
        Columns(panels_shown, equal=False, expand=False),
        *pool,
        _requests(frame, most, is_wide),
    )


def _headline(frame: Frame, url: str, state: str) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("moonpool ", "bold").append(url)
    if frame["tenant"]:
        text.append(f"  requests of {frame['tenant']}")
    stages = ", ".join(f"{n} {reason_words(stage)}" for stage, n in frame["stages"].items())
    text.append(f"  {frame['under_way']} under way" + (f": {stages}" if stages else ""))
    if state:
        text.append(f"  {state}", "bold red")
    return text


# Instances


def _instances(frame: Frame, is_wide: bool) -> RenderableType:
    table = new_table(is_wide)
    table.add_column("instance", no_wrap=True)
    table.add_column("role", no_wrap=True)
    if not frame["instances"]:
        return Text("No instance has joined.", "yellow")
    with_load = "load" in frame["instances"][0]
    if with_load:
        load = "load now, with all booked" if is_wide else "load booked"
        table.add_column(load, no_wrap=True)
        for name in (
            "prefills",
            "decodes",
            "held",
            "cached",
            "of blocks" if is_wide else "blocks",
            "SSD",
        ):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    ordered = sorted(frame["instances"], key=lambda i: (_ROLES.index(i["role"]), i["instance_id"]))
    for one in ordered:
        row: list[RenderableType] = [one["instance_id"], one["role"]]
        if with_load:
            ssd = one.get("ssd")
            row += [_load(one["load"], one["projected"], _BAR_CELLS if is_wide else 0)]
            row += [str(one["prefills"]), str(one["decodes"])]
            row += [f"{one[name]:,}" for name in ("held", "cached", "blocks")]
            row += [f"{ssd['cached']:,}" if ssd else "-"]
        table.add_row(*row, _remark(one, is_wide))
    return table


def _remark(one: dict[str, Any], is_wide: bool) -> Text:
    """Returns what an operator should know about an instance, mostly nothing."""
    ssd = one.get("ssd") or {}
    if one["draining"]:
        return Text(f"draining: {one['draining']}" if is_wide else "draining", "yellow")
    if ssd.get("error"):
        return Text("without its SSD" if is_wide else "no SSD", "red")
    if ssd.get("damaged"):
        return Text(
            f"{ssd['damaged']:,} blocks damaged on SSD" if is_wide else "SSD damaged", "red"
        )
    note = one.get("note", "")
    return Text(note if is_wide or not note else "note", "yellow")


def _load(now: float, booked: float, cells: int) -> Text:
    """Returns both loads as numbers and as a bar, whose full length is the SLO."""
    style = "red" if max(now, booked) >= 1 else "blue"
    solid = min(round(now * cells), cells)
    light = max(min(round(booked * cells), cells) - solid, 0)
    bar = Text("█" * solid + "▒" * light, style)
    bar.append("·" * (cells - solid - light), "dim")
    numbers = f"{now:5.2f} {booked:5.2f}"
    return bar.append(f" {numbers}", "default") if cells else Text(numbers, style)


# Sums


def _latencies(frame: Frame) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name in ("", "p50", "p90", "p99", "SLO"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s")):
        found, slo_s = frame["totals"][key], frame["slo"][key]
        shown = [
            Text(_seconds(found[p]), "red" if found[p] > slo_s else "") if found else Text("-")
            for p in ("p50", "p90", "p99")
        ]
        table.add_row(name, *shown, _seconds(slo_s))
    totals = frame["totals"]
    table.add_row("")
    lines = f"{totals['answered']:,} answered, {totals['effective']:,} within both SLOs"
    return Panel(Group(table, Text(lines)), title="latencies, last 10 min", width=46)


def _tiers(tokens: dict[str, int]) -> RenderableType:
    whole = sum(tokens.values())
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, name in _TIERS:
        share = tokens[key] / whole if whole else 0.0
        bar = Text("█" * round(share * _BAR_CELLS), "yellow" if key == "computed" else "green")
        table.add_row(name, f"{tokens[key]:>11,}", f"{share:>4.0%}", bar)
    return Panel(table, title="prompt tokens by tier", width=44)


def _refusals(frame: Frame) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    reasons = list(frame["totals"]["not_answered"].items())
    for reason, number in reasons[:4]:
        table.add_row(reason_words(reason), f"{number:,}")
    if not reasons:
        table.add_row(Text("none", "dim"))
    return Panel(table, title="without an answer", width=32)


# Requests


def _requests(frame: Frame, most: int, is_wide: bool) -> RenderableType:
    table = new_table(is_wide)
    for name in ("request", "state", "instances"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("prompt", "cached", "tokens" if is_wide else "out", "TTFT", "TBT", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("stages", no_wrap=True)
    for one in frame["requests"][:most]:
        table.add_row(*_request_row(one, frame, is_wide)[: len(table.columns)])
    return table


def _request_row(one: dict[str, Any], frame: Frame, is_wide: bool) -> list[RenderableType]:
    answered = one["outcome"] in _ANSWERED
    state = reason_words(one["outcome"] or one["stage"])
    style = "" if answered or not one["outcome"] else "red"
    places = [one["prefill"]]
    if one["decode"] and one["decode"] != one["prefill"]:
        places.append(one["decode"])
    cached = sum(one["tokens"][key] for key in ("dram", "fetched", "ssd"))
    name = one["id"] if frame["tenant"] or not one["tenant"] else f"{one['tenant']}/{one['id']}"
    late = answered and not one["effective"]
    times = [
        Text(_seconds(one[key]), "red" if late and (one[key] or 0) > frame["slo"][key] else "")
        for key in ("ttft_s", "tbt_s")
    ]
    arrow = " → " if is_wide else "→"
    where = arrow.join(place for place in places if place) or "-"
    return [
        name[:32] if is_wide else name[:_SHORT_ID],
        Text(state if is_wide else _cut(state, _SHORT_STATE), style),
        where if is_wide else _cut(where, _SHORT_PLACES),
        f"{sum(one['tokens'].values()):,}",
        f"{cached:,}",
        f"{one['generated_tokens']:,}",
        *times,
        _seconds(one["seconds"]),
        _stages(one["stages_s"]),
    ]


def _stages(stages_s: dict[str, float]) -> Text:
    """A bar of the request's stages, each in its colour."""
    whole_s, bar = sum(stages_s.values()), Text()
    for name, style in _STAGES:
        share = stages_s.get(name, 0.0) / whole_s if whole_s else 0.0
        bar.append("█" * round(share * _BAR_CELLS), style)
    return bar


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(seconds)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
