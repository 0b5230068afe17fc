"""Tests the choices, comparisons and measures of `moonpool bench kills`, without a cluster."""

from __future__ import annotations

import json
import random
import signal

import pytest

from benchmarks.reliability_page import page
from benchmarks.suite.live.kills.calls import ResponseError, calls, encoded, texts_of
from benchmarks.suite.live.kills.campaign import Campaign, InjectedFault, figures
from benchmarks.suite.live.kills.load import Reply
from benchmarks.suite.live.kills.processes import kind_of


def reply(*arrivals: float, sent_s: float = 0.0, ended_s: float | None = None) -> Reply:
    made = Reply(0, True)
    made.sent_s, made.arrivals, made.ended_s = sent_s, list(arrivals), ended_s
    return made


def test_a_pause_is_the_longest_gap_after_the_fault_and_before_the_next() -> None:
    stream = reply(1.0, 2.0, 2.5, 6.0, 7.0, 20.0, ended_s=20.0)
    assert stream.pause(2.6, 10.0, 99.0) == pytest.approx(3.5)  # the pause began before the fault
    # the next fault did not interrupt this stream
    assert stream.pause(6.5, 7.5, 99.0) == pytest.approx(1.0)
    assert stream.pause(7.5, 12.0, 99.0) == pytest.approx(5.0)
    # None, because the stream had no token before the fault
    assert stream.pause(0.5, 12.0, 99.0) is None
    waits = reply(1.0, 2.0)
    assert waits.pause(2.5, 30.0, 12.0) == pytest.approx(10.0)  # until now
    assert reply(1.0, 2.0, ended_s=2.0).pause(1.5, 30.0, 12.0) == pytest.approx(1.0)


def test_processes_are_told_apart_by_their_command_lines() -> None:
    python = "/usr/bin/python3 -m moonpool"
    kinds = {
        f"{python} head-process --fd 3": "head",
        f"{python} worker --role decode --name decode-0": "decode",
        f"{python} worker --role attention --name attention-0": "attention worker",
        f"{python} stage --of decode-0 --number 2 --control-fd 24": "stage",
        f"{python} rank --of decode-0 --number 2 --control-fd 24": "rank",
        "moonpool fork server": "fork server",
        "moonpool spare fork server": "spare fork server",
        f"{python} fork-server --fd 3": "fork server",
        "python -m moonpool.api.grammars.check_process 17": "grammar check",
        "moonpool part of decode-0": "",
        "bash -c head-processes": "",
    }
    assert {command: kind_of(command) for command in kinds} == kinds


def test_the_same_seed_gives_the_same_faults_and_calls_and_each_kind_its_turn() -> None:
    def plans(seed: int) -> list[tuple[str, signal.Signals]]:
        drawn = random.Random(seed)
        return Campaign((), 4, drawn, (1.0, 2.0), print).plans(["a", "b", "c"], 6, 3)

    assert plans(1) == plans(1) != plans(2)
    assert sorted(plans(1)) == sorted(
        [(kind, signal.SIGKILL) for kind in "abc"] * 2 + [(kind, signal.SIGSTOP) for kind in "abc"]
    )
    assert calls(24, 3) == calls(24, 3) != calls(24, 4)
    assert json.loads(encoded(9, {"n": 1})) == {"n": 1}
    assert len(encoded(9, {"n": 1})) > 1 << 16


def chunk(text: str) -> bytes:
    event = {"choices": [{"index": 0, "text": text, "logprobs": None}]}
    return b"id: 1\ndata: " + json.dumps(event).encode() + b"\n\n"


def test_a_response_that_is_cut_or_ends_with_an_error_is_told_from_a_whole_one() -> None:
    path, body = "/v1/completions", {"stream": True}
    whole = chunk("a") + chunk("b") + b"data: [DONE]\n\n"
    assert texts_of(path, body, whole) == {0: "ab"}
    error = b'data: {"error": {"code": "x"}}\n\n'
    for broken in (whole[:-3], chunk("a"), b"", chunk("a") + error + b"data: [DONE]\n\n"):
        with pytest.raises((ResponseError, ValueError)):
            texts_of(path, body, broken)


def test_answers_are_counted_for_the_faults_that_they_met_and_shown_on_the_page() -> None:
    campaign = Campaign((), 4, random.Random(1), (1.0, 2.0), print)
    campaign.faults = [
        InjectedFault("head", signal.SIGKILL, False, 10.0, 0.0, 1.0),
        InjectedFault("decode", signal.SIGSTOP, True, 20.0, 5.0, None),
    ]
    replies = [
        reply(9.0, 9.5, 12.0, ended_s=13.0, sent_s=8.0),
        reply(9.0, 19.0, 24.0, ended_s=25.0, sent_s=9.0),
        reply(30.0, ended_s=31.0, sent_s=29.0),
    ]
    for each, outcome in zip(replies, ("right", "wrong", "right"), strict=True):
        each.outcome = outcome
    campaign.load.replies = replies
    found = figures(campaign)
    assert found["answers"] == {"right": 2, "wrong": 1, "refused": 0, "cut": 0, "hung": 0}
    decode, head = found["rows"]
    assert head["answers"]["right"] == 1
    assert (head["pauses_s"], head["not_recovered"]) == ([2.5, 10.0], 0)
    assert (decode["answers"]["wrong"], decode["not_recovered"]) == (1, 1)
    assert decode["pauses_s"] == [5.0]
    origin = {"command": "x", "commit": "y", "machine": "z"}
    shown = page(
        {"faults": [], "origin": origin},
        {"arrangements": [{"arrangement": "2M"} | found], "origin": origin},
    )
    assert "| 2M | 2 | 2 right, 1 wrong, 0 refused, 0 cut | - |" in shown
    assert "| decode, one of two | SIGSTOP | 1 | 5.00 s | 5.00 s | 5.00 s |" in shown
