"""Puts a report together: the opening, the figures by what they tell, settings and glossary.

One self-contained page: no scripts, no fonts, no pictures from elsewhere; its policy forbids them.
All that comes from outside is escaped where it is written. The same simulation gives the same
bytes: how long it took and when it ran are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from moonpool.report.cluster import (
    instances_figure,
    load_figure,
    queue_figure,
    roles_figure,
    running_figure,
)
from moonpool.report.figure import Figure
from moonpool.report.glossary import glossary
from moonpool.report.latency import (
    compute_figure,
    foresight_figure,
    stages_figure,
    tbt_figure,
    ttft_figure,
)
from moonpool.report.opening import opening
from moonpool.report.requests import refusals_figure, requests_figure
from moonpool.report.settings import settings
from moonpool.report.style import STYLE
from moonpool.report.traffic import busiest_figure, cache_figure, held_figure, links_figure
from moonpool.sim.simulation import Simulation

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LEFT_OUT = ("wall_s", "config")  # not reproducible; shown on its own


def render_report(
    simulation: Simulation, figures: dict[str, Any], command: str, trace_name: str
) -> str:
    """HTML of a simulation that has run. `figures` are those of `summarise`."""
    parts = (
        ("What users felt", _felt(simulation, figures)),
        ("How the cluster coped", _coped(simulation, figures)),
        ("KVCache and network", _moved(simulation, figures)),
    )
    kept = {name: value for name, value in figures.items() if name not in LEFT_OUT}
    raw = escape(json.dumps(kept, indent=1, ensure_ascii=False))
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>moonpool simulation of {escape(trace_name)}</title>",
            f"<style>{STYLE}</style></head><body>",
            "<header><h1>moonpool simulation</h1>",
            opening(simulation, figures, trace_name),
            "</header><main>",
            *(_section(title, drawn) for title, drawn in parts),
            f"<h2>How to get this page again</h2>{settings(simulation, command, trace_name)}",
            f"<details><summary>All figures, as in --json</summary><pre>{raw}</pre></details>",
            f"<h2>Words</h2>{glossary()}",
            "</main></body></html>",
            "",
        )
    )


def _felt(simulation: Simulation, figures: dict[str, Any]) -> list[Figure]:
    return [
        ttft_figure(simulation),
        tbt_figure(simulation),
        requests_figure(simulation),
        stages_figure(figures),
        refusals_figure(figures),
    ]


def _coped(simulation: Simulation, figures: dict[str, Any]) -> list[Figure]:
    return [
        load_figure(simulation),
        instances_figure(simulation),
        roles_figure(simulation, figures),
        queue_figure(simulation),
        running_figure(simulation),
        compute_figure(simulation, figures),
        foresight_figure(simulation, figures),
    ]


def _moved(simulation: Simulation, figures: dict[str, Any]) -> list[Figure]:
    return [
        cache_figure(figures),
        links_figure(simulation, figures),
        held_figure(simulation, figures),
        busiest_figure(simulation),
    ]


def _section(title: str, drawn: Sequence[Figure]) -> str:
    body = "\n".join(figure.html() for figure in drawn)
    return f'<section><h2>{escape(title)}</h2><div class="figures">{body}</div></section>'
