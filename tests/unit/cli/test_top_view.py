"""Tests what the view of `moonpool top` says about a frame."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from moonpool.cli.server.address import bearer_key
from moonpool.cli.watch.status import status_lines
from moonpool.cli.watch.top_view import render


def a_request(number: int, **changes: Any) -> dict[str, Any]:
    request = {
        "id": f"request-{number}",
        "tenant": "",
        "prefill": "prefill-0",
        "decode": "decode-0",
        "seconds": 1.5,
        "ttft_s": 0.25,
        "tbt_s": 0.05,
        "effective": True,
        "generated_tokens": 20,
        "tokens": {"dram": 64, "fetched": 32, "ssd": 0, "computed": 4},
        "stages_s": {"prefill": 0.75, "decode": 0.75},
        "outcome": "stop",
        "stage": "",
        "ended_s_ago": 1.0,
    }
    return request | changes


def a_frame(**changes: Any) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "tenant": None,
        "slo": {"ttft_s": 0.5, "tbt_s": 0.1},
        "instances": [
            {
                "instance_id": "decode-0",
                "role": "decode",
                "draining": "a client requested it",
                "load": 0.5,
                "projected": 1.25,
                "prefills": 0,
                "decodes": 2,
                "held": 10,
                "cached": 2000,
                "blocks": 4096,
            }
        ],
        "under_way": 3,
        "stages": {"queue_and_fetch": 1, "decode": 2},
        "totals": {
            "answered": 5,
            "effective": 4,
            "ttft_s": {"p50": 0.1, "p90": 0.7, "p99": 0.9},
            "tbt_s": None,
            "tokens": {"dram": 75, "fetched": 0, "ssd": 0, "computed": 25},
            "not_answered": {"ttft_slo": 7},
        },
        "requests": [a_request(number) for number in range(40)],
    }
    return frame | changes


def shown(frame: dict[str, Any], lines: int | None = None, state: str = "") -> str:
    console = Console(width=170, record=True, force_terminal=True, color_system="truecolor")
    with console.capture() as captured:
        console.print(render(frame, "http://host:1", state, 170, lines))
    return captured.get()


def plain(frame: dict[str, Any], lines: int | None = None, columns: int = 170) -> str:
    console = Console(width=columns, no_color=True)
    with console.capture() as captured:
        console.print(render(frame, "http://host:1", "", columns, lines))
    return captured.get()


def test_it_names_stages_loads_tiers_and_refusals() -> None:
    text = plain(a_frame())
    assert "3 under way: 1 queue and fetch, 2 decode" in text
    assert " 0.50  1.25" in text and "draining: a client requested it" in text
    assert "75%" in text and "25%" in text
    assert "TTFT SLO" in text and "7" in text
    assert "5 answered, 4 within both SLOs" in text


def test_it_fits_the_terminal() -> None:
    for lines in (24, 30, 50):
        assert plain(a_frame(), lines).count("\n") <= lines
    assert plain(a_frame()).count("request-") == 40


def a_pool(**changes: Any) -> dict[str, Any]:
    flows = ("handed_over", "sent", "fetched", "copied", "ssd_loaded", "ssd_stored")
    moved = {
        "instance_id": "prefill-0",
        "bytes": dict.fromkeys(flows, 0.0) | {"fetched": 7.2e6},
        "bytes_per_s": dict.fromkeys(flows, 0.0) | {"fetched": 1.4e6},
    }
    hot = {"name": "calm-otter-17", "key": "ab" * 16, "tokens": 1344, "bytes": 13_762_560}
    hot |= {"hits": 180, "replicas": 2}
    return a_frame(hot=[hot | {"dram": ["p-1"], "ssd": ["p-0"]}] * 9, moved=[moved], **changes)


def test_it_shows_hot_prefixes_and_transfers_where_there_is_room() -> None:
    text = plain(a_pool())
    assert text.count("calm-otter-17 ") == 5 and "13.8 MB" in text and "p-1" in text
    assert "1.4 MB, 7.2 MB" in text
    for lines in (24, 34, 40, 50, 60):
        assert plain(a_pool(), lines).count("\n") <= lines
    assert "hottest prefixes" in plain(a_pool(), 50)
    assert "transfers" not in plain(a_frame())


def test_80_columns_show_every_heading_and_figure() -> None:
    requests = [
        a_request(1, id="0880d9d1b4e3ae88da0087c5", ttft_s=0.0832, tbt_s=0.00277, seconds=0.0531),
        a_request(2, outcome="ttft_slo"),
    ]
    frame = a_pool(requests=requests, under_way=0, stages={})
    text = plain(frame, 60, 80)
    assert "…" not in text
    for shown_in_80 in ("held", "blocks", "4,096", "0.50  1.25", "draining", "within both SLOs"):
        assert shown_in_80 in text
    for shown_in_80 in ("prefill-0→decode-0", "83.2 ms", "50 ms", "1.50 s", "0880d9d"):
        assert shown_in_80 in text
    assert "1.4 MB, 7.2 MB" in text and "SSD stored" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for lines in (24, 34, 50):
        assert plain(a_pool(), lines, 80).count("\n") <= lines + 2 * (lines < 30), lines


def test_only_late_answers_are_red() -> None:
    red = "\x1b[31m"
    calm = a_frame(instances=[], requests=[a_request(0, ttft_s=0.1)])
    calm["totals"] = calm["totals"] | {"ttft_s": None}
    assert red not in shown(calm)
    late = a_request(0, ttft_s=0.8, effective=False)
    assert f"{red}800 ms" in shown(calm | {"requests": [late]})
    assert f"{red}TTFT SLO" in shown(calm | {"requests": [a_request(0, outcome="ttft_slo")]})


def test_a_tenant_sees_no_loads() -> None:
    instance = {"instance_id": "prefill-0", "role": "prefill", "draining": None}
    text = plain(a_frame(tenant="search", instances=[instance]))
    assert "requests of search" in text and "load now" not in text


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONPOOL_ADMIN_KEY", "MOONPOOL_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert bearer_key(None) == ""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-o")
    assert bearer_key(None) == "sk-o"
    monkeypatch.setenv("MOONPOOL_API_KEY", "sk-a, sk-b")
    assert bearer_key(None) == "sk-a"
    assert bearer_key("sk-given") == "sk-given"


@pytest.mark.parametrize(
    ("ssd", "remark", "line"),
    [
        ({"damaged": 0, "error": ""}, "", ""),
        ({"damaged": 1200, "error": ""}, "1,200 blocks damaged on SSD", "1,200 damaged blocks"),
        ({"damaged": 0, "error": "/ssd is gone"}, "without its SSD", "without it: /ssd is gone"),
        ({}, "", ""),  # the frame of a head of the earlier release
    ],
)
def test_a_disk_that_fails_or_damages_blocks_has_a_row(
    ssd: dict[str, Any], remark: str, line: str
) -> None:
    frame = a_frame()
    frame["instances"][0] |= {"draining": None, "ssd": {"blocks": 9, "cached": 4, **ssd}}
    frame |= {"loads": None, "standbys": []}
    frame["totals"] |= {"ended": 5}
    text = plain(frame)
    assert (remark in text) if remark else ("damaged" not in text and "its SSD" not in text)
    disks = [text for text in status_lines(frame) if text.startswith("disk")]
    assert [line in text and "decode-0" in text for text in disks] == [True] * bool(line)
