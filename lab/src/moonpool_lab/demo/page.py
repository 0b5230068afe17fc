"""The page that the demo leaves behind: its turns, its events and the latency breakdown.

It is self-contained, and the template escapes all text.
"""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, StrictUndefined

from moonpool_lab.demo.answers import COLUMNS, AnsweredTurn, DemoRun

STAGES = ("queue_and_fetch", "prefill", "handover", "decode")


def render_page(on: DemoRun, off: DemoRun) -> str:
    """Returns the HTML page of both clusters, the one with a cache first."""
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    longest_s = max(
        (sum(row.explained["stages_s"].values()) for run in (on, off) for row in run.rows),
        default=1.0,
    )
    same = on.last(len(off.turns_s))
    tiles = (
        ("mean TTFT", f"{1e3 * same.mean_ttft_s:.0f} ms", f"{1e3 * off.mean_ttft_s:.0f} without"),
        ("cached tokens", f"{on.cached_tokens:,}", f"of {on.prompt_tokens:,}"),
        ("from other instances", f"{on.fetched_tokens:,}", "tokens"),
        ("from SSDs", f"{on.loaded_tokens:,}", "tokens"),
    )
    return environment.from_string(template).render(
        tiles=tiles,
        events=on.events,
        columns=COLUMNS,
        stages=STAGES,
        runs=[
            (title, [(row.cells, _bars(row, longest_s)) for row in run.rows + run.after])
            for title, run in (("Cache on", on), ("Cache off", off))
        ],
    )


def _bars(row: AnsweredTurn, longest_s: float) -> list[tuple[str, float, str]]:
    """Each stage's name, width in percent, and text."""
    spent_s = row.explained["stages_s"]
    longest_s = max(longest_s, sum(spent_s.values()), 1e-9)
    return [
        (stage, round(100 * spent_s.get(stage, 0.0) / longest_s, 2), _text(stage, spent_s))
        for stage in STAGES
    ]


def _text(stage: str, spent_s: dict[str, float]) -> str:
    return f"{stage.replace('_', ' ')}: {1e3 * spent_s.get(stage, 0.0):.1f} ms"
