"""The live page's stream on a real cluster shows instances with loads, and the requests just
served."""

from __future__ import annotations

import json
from typing import Any

import httpx
from click.testing import CliRunner

from moonpool.cli.watch.status import status
from tests.live.waiting import wait_until


def next_frame(http: httpx.Client) -> dict[str, Any]:
    with http.stream("GET", "/cluster/events") as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("the stream ended without a frame")


def test_events_show_instances_and_the_request_just_served(http: httpx.Client) -> None:
    body = {"prompt": list(range(5, 105)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for name in ("watched-1", "watched-2"):
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": name})
        assert answer.status_code == 200, answer.text

    def shown() -> tuple[dict[str, Any], dict[str, Any]] | None:
        frame = next_frame(http)
        found = [one for one in frame["requests"] if one["id"] == "watched-2" and one["outcome"]]
        return (frame, found[0]) if found else None

    frame, again = wait_until(shown)
    assert {one["role"] for one in frame["instances"]} == {"prefill", "decode"}
    assert all(one["load"] >= 0 and one["blocks"] > 0 for one in frame["instances"])
    assert again["outcome"] == "length"
    assert again["tokens"]["dram"] + again["tokens"]["fetched"] >= 80, "the prompt was cached"
    assert sum(again["tokens"].values()) == 100
    assert abs(sum(again["stages_s"].values()) - again["seconds"]) < 1e-3
    assert frame["totals"]["answered"] >= 2
    assert http.get(f"/explain/{again['id']}").json()["why"]


def test_events_show_hot_prefixes_and_what_was_handed_over(http: httpx.Client) -> None:
    body = {"prompt": list(range(105, 205)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for _ in range(4):
        assert http.post("/v1/completions", json=body).status_code == 200

    def shown() -> dict[str, Any] | None:
        frame = next_frame(http)
        moved = [
            sum(one["bytes"][way] for one in frame["moved"]) for way in ("handed_over", "sent")
        ]
        return frame if frame["hot"] and all(moved) else None

    frame = wait_until(shown)
    hottest = frame["hot"][0]
    names = {one["instance_id"] for one in frame["instances"]}
    assert hottest["name"].count("-") == 2  # `pool ls` shows the same name
    assert hottest["hits"] >= 1 and hottest["tokens"] > 0 and hottest["bytes"] > 0
    assert hottest["dram"] and {*hottest["dram"], *hottest["ssd"]} <= names
    columns = frame["history"]["columns"]
    assert sum(value or 0 for value in columns["answered"]) >= 4
    assert columns["prefill_load"][-1] is not None


def test_status_has_five_lines(http: httpx.Client) -> None:
    shown = CliRunner().invoke(status, [str(http.base_url)])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert len(lines) == 5
    assert lines[0] == "instances  2 prefill, 2 decode"
    assert "blocks held" in lines[1]
    gone = CliRunner().invoke(status, ["http://127.0.0.1:9"])
    assert gone.exit_code != 0
    assert gone.output.count("\n") == 1 and "no server answers" in gone.output
