"""Tests when a simulation counts as equal to a live run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.studies.run_inputs import different_inputs
from moonpool_lab.replay.comparison import averaged, chance_words, compare
from tests.cli_runner import invoke

SPREAD = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0}
FIGURES: dict[str, Any] = {
    "requests": 100,
    "effective": 90,
    "goodput_rps": 1.5,
    "rejected": 100,
    "ttft_s": SPREAD,
    "tbt_s": SPREAD,
    "tbt_top10_mean_s": SPREAD,
    "cache": {"hit_ratio": 0.5},
    "prefill_compute_s": {"mean": 0.5},
    "wasted_prefill_s": 0.0,
    "utilisation": {"prefill": 0.5, "decode": 0.25},
}


def changed(*path: str, value: float) -> dict[str, Any]:
    figures = copy.deepcopy(FIGURES)
    at = figures
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return figures


def test_equal_figures_agree() -> None:
    comparison = compare(FIGURES, FIGURES)
    assert comparison.passes
    assert all(row.difference == 0 for row in comparison.rows)


@pytest.mark.parametrize(
    ("path", "value", "passes"),
    [
        (("ttft_s", "mean"), 1.14, True),
        (("ttft_s", "mean"), 1.16, False),
        (("tbt_s", "p90"), 1.6, False),
        (("tbt_s", "p99"), 9.0, True),  # passes, because P99 is shown but not judged
        (("rejected",), 110, True),
        (("rejected",), 112, False),
        (("rejected",), 85, False),
        (("cache", "hit_ratio"), 0.9, True),
    ],
)
def test_the_limits(path: tuple[str, ...], value: float, passes: bool) -> None:
    assert compare(changed(*path, value=value), FIGURES).passes is passes


def test_a_few_rejections_are_chance_and_many_against_none_are_not() -> None:
    none = changed("rejected", value=0)
    assert compare(changed("rejected", value=5), none).passes
    assert not compare(changed("rejected", value=6), none).passes


def run(tmp_path: Path, simulated: Any, live: Any, *more: str) -> Any:
    for name, figures in (("s.json", simulated), ("l.json", live)):
        (tmp_path / name).write_text(json.dumps(figures))
    return invoke("compare", tmp_path / "s.json", tmp_path / "l.json", *more)


def test_the_command_says_so_by_its_status(tmp_path: Path) -> None:
    good = run(tmp_path, FIGURES, FIGURES, "--json", str(tmp_path / "out.json"))
    assert good.exit_code == 0 and "TTFT mean s" in good.output
    assert json.loads((tmp_path / "out.json").read_text())["passes"] is True
    bad = run(tmp_path, changed("ttft_s", "p90", value=9.0), FIGURES)
    assert bad.exit_code == 1 and "TOO FAR" in bad.output
    assert run(tmp_path, {"requests": 1}, FIGURES).exit_code == 1


def test_several_live_runs_are_averaged_and_their_chance_is_told() -> None:
    runs = [
        {"requests": 10, "ttft_s": {"mean": 1.0, "p90": 2.0}, "tbt_s": {"mean": 0.1, "p90": 0.2}},
        {"requests": 10, "ttft_s": {"mean": 1.2, "p90": 2.0}, "tbt_s": {"mean": 0.1, "p90": 0.3}},
    ]
    mean = averaged(runs)
    assert mean["ttft_s"] == {"mean": pytest.approx(1.1), "p90": 2.0} and mean["requests"] == 10
    (words,) = chance_words(runs)
    assert "TTFT mean 18.2%" in words and "TBT p90 40.0%" in words and "2 live runs" in words
    assert list(chance_words(runs[:1])) == [] and averaged(runs[:1]) == runs[0]


def made(**changes: Any) -> dict[str, Any]:
    """Makes figures with the inputs that both commands write."""
    run = {"trace": "t.jsonl", "trace_sha256": "ab", "speed": 1.0, "scale_tokens": "1/32"}
    slo = {"ttft_s": 30.0, "tbt_s": 0.1}
    run |= {name: changes.pop(name) for name in tuple(changes) if name in run}
    return FIGURES | {"run": run, "seed": 0, "config": {"slo": slo}} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trace": "u.jsonl", "trace_sha256": "cd"}, "trace t.jsonl and u.jsonl"),
        ({"trace_sha256": "cd"}, "two traces are named t.jsonl"),
        ({"requests": 99}, "requests 100 and 99"),
        ({"speed": 2.0}, "speed 1 and 2"),
        ({"scale_tokens": "1"}, "share of tokens 1/32 and 1"),
        ({"seed": 4}, "seed 0 and 4"),
        ({"slo": {"ttft_s": 30.0, "tbt_s": 0.2}}, "TBT SLO 0.1 and 0.2"),
    ],
)
def test_runs_of_different_inputs_are_refused_in_one_line(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = run(tmp_path, made(), made(**changes))
    assert found.exit_code != 0
    assert found.output.strip().endswith(f"these runs are not comparable: {said}")
    assert "\n" not in found.output.strip()


def test_runs_of_the_same_inputs_are_compared(tmp_path: Path) -> None:
    renamed = made(trace="copy.jsonl", slo={"ttft_s": 30.0, "tbt_s": 0.1})
    assert run(tmp_path, made(), renamed).exit_code == 0
    assert different_inputs(made(), FIGURES) == []
