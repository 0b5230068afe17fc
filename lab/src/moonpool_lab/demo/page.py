"""Writes the page that the demo leaves behind: its turns, its events and the latency breakdown.

The page is self-contained, and the template escapes all text.
"""

from __future__ import annotations

from moonpool.sim.report.page import environment
from moonpool_lab.demo.answers import COLUMNS, TEXTS, AnsweredTurn, DemoRun

STAGES = {"queue_and_fetch": "b2", "prefill": "b1", "handover": "b4", "decode": "b3"}
"""The stages of a request, with the colour of each on all pages."""


def render_page(on: DemoRun, off: DemoRun) -> str:
    """Returns the HTML page of both clusters, starting with the one that has a cache."""
    longest_s = max(
        (sum(row.explained["stages_s"].values()) for run in (on, off) for row in run.rows),
        default=1.0,
    )
    same = on.last(len(off.turns_s))
    tiles = (
        (
            f"mean TTFT, last {len(same.rows)} answers",
            f"{1e3 * same.mean_ttft_s:,.0f} ms",
            f"{1e3 * off.mean_ttft_s:,.0f} ms without reuse",
        ),
        ("cached tokens", f"{on.cached_tokens:,}", f"of {on.prompt_tokens:,} of all prompts"),
        ("from other instances", f"{on.fetched_tokens:,}", "tokens"),
        ("from SSDs", f"{on.loaded_tokens:,}", "tokens"),
    )
    rows = [row for run in (on, off) for row in run.rows + run.after]
    right = sum(row.right for row in rows)
    faster = off.mean_ttft_s / same.mean_ttft_s if same.mean_ttft_s else 1.0
    template = environment(__package__).get_template("page.html.jinja")
    return template.render(
        lead=f"{right} of {len(rows)} answers are right, also that of an instance that was killed."
        f" With reuse of KVCache, the first tokens of the same questions came {faster:.1f} times as"
        " soon.",
        tiles=tiles,
        events=on.events,
        columns=[(name, "" if name in TEXTS else "number") for name in COLUMNS],
        stages=STAGES.items(),
        runs=[
            (title, [(row.cells, _bars(row, longest_s)) for row in run.rows + run.after])
            for title, run in (("Cache on", on), ("Cache off", off))
        ],
    )


def _bars(row: AnsweredTurn, longest_s: float) -> list[tuple[str, float, str]]:
    """Returns each stage's name, width in percent, and text."""
    spent_s = row.explained["stages_s"]
    longest_s = max(longest_s, sum(spent_s.values()), 1e-9)
    return [
        (css, round(100 * spent_s.get(stage, 0.0) / longest_s, 2), _text(stage, spent_s))
        for stage, css in STAGES.items()
    ]


def _text(stage: str, spent_s: dict[str, float]) -> str:
    return f"{stage.replace('_', ' ')}: {1e3 * spent_s.get(stage, 0.0):.1f} ms"
