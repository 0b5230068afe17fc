"""Measures effective requests of the admission policies, on workloads that no figure of the project
uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runner import succeed

OTHERS = ("none", "baseline", "early")
MOST_LOST = 0.7
"""At a single load, `goodput` must reach at least this share of the best other policy's figure."""


def trace(folder: Path, profile: str, requests: int, seed: int) -> Path:
    path = folder / f"{profile}-{requests}-{seed}.jsonl"
    flags = ["--profile", profile, "--requests", str(requests), "--seed", str(seed)]
    succeed("trace", "generate", *flags, "-o", path)
    return path


def effective(path: Path, admission: str, *flags: str) -> int:
    figures = path.with_suffix(f".{admission}.out")
    command = ["simulate", "--trace", str(path), "--admission", admission, *flags]
    succeed(*command, "--json", figures)
    found: dict[str, Any] = json.loads(figures.read_text())
    return int(found["effective"])


def compare(path: Path, *flags: str, policies: tuple[str, ...] = OTHERS) -> tuple[int, int]:
    """Returns effective requests of `goodput`, and of the best other policy."""
    best = max(effective(path, policy, *flags) for policy in policies)
    return effective(path, "goodput", *flags), best


def test_under_overload_waiting_serves_many_more(tmp_path: Path) -> None:
    """With the wait for a decode batch, each admission policy must serve more requests than without
    it."""
    path = trace(tmp_path, "toolagent", 400, 11)
    flags = ("--speed", "8", "--prefill", "2", "--decode", "1", "--slo-tbt", "0.035")
    ours, best = compare(path, *flags, policies=("baseline",))
    assert ours > 0.9 * best
    assert min(ours, best) > 1.2 * effective(path, "baseline", *flags, "--no-decode-wait")


def test_without_overload_nothing_is_rejected(tmp_path: Path) -> None:
    path = trace(tmp_path, "conversation", 150, 12)
    assert effective(path, "goodput", "--speed", "0.5", "--prefill", "4", "--decode", "4") == 150


@pytest.mark.long
def test_long_answers_fill_the_steps_up_to_their_slo(tmp_path: Path) -> None:
    """The steps of long answers are short at the start and full later, which admission must expect.
    A policy that mistakes full steps for slow ones leaves an eighth of each step empty."""
    path = trace(tmp_path, "conversation", 400, 4711)
    flags = ("--speed", "4", "--prefill", "4", "--decode", "4", "--slo-tbt", "0.05")
    ours, best = compare(path, *flags, policies=("baseline",))
    assert ours > 0.9 * best
    assert ours > 1.05 * effective(path, "baseline", *flags, "--no-decode-wait")


@pytest.mark.long
def test_mixed_instances_keep_their_slos_under_overload(tmp_path: Path) -> None:
    """Chunks share steps with decodes. A prediction that ignored this would admit twice as many
    requests as meet their SLOs, so all policies take it into account."""
    path = trace(tmp_path, "conversation", 250, 13)
    flags = ("--mixed", "2", "--speed", "4", "--slo-tbt", "0.1")
    ours, best = compare(path, *flags)
    assert ours >= 0.97 * best
    assert ours > 2.5 * effective(path, "none", *flags)


@pytest.mark.long
def test_mixed_instances_without_tiles_keep_the_tbt_slo(tmp_path: Path) -> None:
    """On CPUs, a chunk of 32 tokens takes most of a step's allowed time, and a few decodes take the
    rest. So chunks must be smaller there."""
    path, cost = tmp_path / "chats.jsonl", tmp_path / "cost.json"
    cost.write_text('{"prefill": [0.04, 0.005, 0, 0], "decode": [0.045, 0.006, 0]}')
    rows = [
        {"timestamp": 1600 * at, "input_length": 512, "output_length": 128, "hash_ids": [at]}
        for at in range(100)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--cost", str(cost), "--mixed", "2", "--slo-ttft", "30", "--slo-tbt", "0.24")
    for policy in ("goodput", "none"):
        assert effective(path, policy, *flags) >= 95, policy


@pytest.mark.long
@pytest.mark.parametrize(
    ("profile", "cluster"),
    [("conversation", "4P+2D"), ("toolagent", "2P+4D"), ("l-eval", "4P+2D")],
)
def test_goodput_serves_most_over_all_loads(tmp_path: Path, profile: str, cluster: str) -> None:
    """A run of 300 requests is too short for prices to pay at every load. So goodput may lose a
    little at a single load, but not over all loads and limits together."""
    path = trace(tmp_path, profile, 300, 21)
    ours_total = best_total = 0
    for slo_tbt in ("0.035", "0.1"):
        flags = ("--prefill", cluster[0], "--decode", cluster[3], "--slo-tbt", slo_tbt)
        for speed in ("1", "3", "9"):
            ours, best = compare(path, "--speed", speed, *flags)
            assert ours >= MOST_LOST * best, (speed, slo_tbt)
            ours_total, best_total = ours_total + ours, best_total + best
    # A policy that rejects the first prompt over a document (l-eval) also loses the hits of later
    # prompts.
    assert ours_total >= (0.9 if profile == "l-eval" else 1.0) * best_total
