"""Tests tenants and priorities of traces, from the file to the figures of a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.trace.jsonl import write_trace
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError
from tests.cli_runner import invoke, succeed


def line(at_ms: int, tokens: int, ids: list[int], **others: Any) -> str:
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": 20, "hash_ids": ids}
    return json.dumps(row | others) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_tenants_share_no_block_and_one_tenants_prompts_do(tmp_path: Path) -> None:
    texts = [line(n, 600, [0, 1], tenant=name) for n, name in enumerate(("a", "b", "a"))]
    path = write(tmp_path / "t.jsonl", *texts, line(3, 600, [0, 1]))
    first, second, third, fourth = open_trace(path)
    assert first.hash_ids == third.hash_ids
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert fourth.hash_ids == (0, 1)
    assert (first.tenant, first.faster(2.0).tenant) == ("a", "a")


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_both_fields_are_read(tmp_path: Path, kind: str) -> None:
    others = {"tenant": "a", "priority": -3} | ({"chat_id": 7} if kind == "bailian" else {})
    ids = list(range(38)) if kind == "bailian" else [0, 1]
    (row,) = open_trace(write(tmp_path / "t.jsonl", line(0, 600, ids, **others)))
    assert (row.tenant, row.priority) == ("a", -3)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    source = write(
        tmp_path / "t.jsonl",
        line(0, 600, [0, 1], tenant="a", priority=2),
        line(5, 600, [0, 1], tenant="a"),
        line(9, 600, [0, 1], tenant="b"),
    )
    write_trace(open_trace(source), tmp_path / "u.jsonl")
    rows = list(open_trace(tmp_path / "u.jsonl"))
    assert [(row.tenant, row.priority) for row in rows] == [("a", 2), ("a", 0), ("b", 0)]
    assert rows[0].hash_ids == rows[1].hash_ids
    assert not set(rows[0].hash_ids) & set(rows[2].hash_ids)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tenant": 7}, "tenant is 7; it must be a name"),
        ({"priority": "high"}, "priority is 'high'; it must be an integer"),
        ({"priority": 2**40}, "it must be between -2147483648 and 2147483647"),
        ({"tennant": "a"}, "unknown field 'tennant'; did you mean tenant? rename it"),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "t.jsonl", line(0, 600, [0, 1], **wrong))
    with pytest.raises(TraceError, match=r"t\.jsonl:1") as caught:
        list(open_trace(path))
    assert words in str(caught.value)


def simulate(tmp_path: Path, trace: Path, *flags: str) -> tuple[dict[str, Any], str]:
    figures = tmp_path / "figures.json"
    command = ["simulate", "--trace", str(trace), "--prefill", "1", "--decode", "1", *flags]
    run = succeed(*command, "--json", figures)
    found: dict[str, Any] = json.loads(figures.read_text())
    return found, run.output


def test_a_simulation_tells_what_each_tenant_got(tmp_path: Path) -> None:
    small = [(n * 4000, line(n * 4000, 2000, [n], tenant="small")) for n in range(12)]
    flood = [(n * 500, line(n * 500, 16_000, [999], tenant="flood")) for n in range(80)]
    texts = []
    for at_ms, text in sorted(small + flood):
        row = json.loads(text)
        first = at_ms * 100 + (row["tenant"] == "small") * 10**8
        row["hash_ids"] = list(range(first, first - (-row["input_length"] // 512)))
        texts.append(json.dumps(row) + "\n")
    trace = write(tmp_path / "t.jsonl", *texts)
    figures, output = simulate(tmp_path, trace, "--admission", "none")
    tenants = figures["tenants"]
    assert (tenants["small"]["requests"], tenants["flood"]["requests"]) == (12, 80)
    assert tenants["small"]["effective"] == 12, "their share is theirs"
    assert tenants["small"]["ttft_s"]["mean"] < 0.2 * tenants["flood"]["ttft_s"]["mean"]
    assert "small: 12 of 12 effective" in output


def test_a_larger_share_serves_more_of_a_tenant(tmp_path: Path) -> None:
    texts = [
        line(n * 250, 16_000, list(range(n * 40, n * 40 + 32)), tenant="ab"[n % 2])
        for n in range(160)
    ]
    trace = write(tmp_path / "t.jsonl", *texts)
    equal, _ = simulate(tmp_path, trace)
    more, _ = simulate(tmp_path, trace, "--tenant-share", "a=4")
    assert more["run"]["tenant_share"] == ["a=4"]
    assert abs(equal["tenants"]["a"]["completed"] - equal["tenants"]["b"]["completed"]) <= 6
    assert more["tenants"]["a"]["completed"] > 1.5 * more["tenants"]["b"]["completed"]


@pytest.mark.long
def test_a_share_of_the_cache_leaves_the_others_their_hits(tmp_path: Path) -> None:
    rows = []
    for n in range(24):  # sends one prompt again and again, and other prompts once
        rows.append((n * 60_000, 8_000, list(range(16)), "small"))
        for k in range(1, 11):
            first = 100_000 * n + 1000 * k
            rows.append((n * 60_000 + k * 5000, 8_000, list(range(first, first + 16)), "bulk"))
    texts = [line(at, tokens, ids, tenant=name) for at, tokens, ids, name in rows]
    trace = write(tmp_path / "t.jsonl", *texts)
    flags = ("--kv-tokens", "40000", "--eviction", "lru", "--admission", "none")
    without, _ = simulate(tmp_path, trace, *flags)
    capped, output = simulate(tmp_path, trace, *flags, "--tenant-cache", "bulk=0.5")
    assert capped["run"]["tenant_cache"] == ["bulk=0.5"]
    assert without["tenants"]["small"]["hit_ratio"] < 0.3
    assert capped["tenants"]["small"]["hit_ratio"] > 0.85
    assert "small: 24 of 24 effective, hits 9" in output


def test_without_tenants_there_are_no_figures_of_them(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", line(0, 600, [0, 1]), line(5, 600, [0, 2]))
    figures, output = simulate(tmp_path, trace)
    assert "tenants" not in figures and "tenants" not in output


def test_a_share_of_the_cache_is_at_most_all(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", line(0, 600, [0, 1]))
    run = invoke("simulate", "--trace", trace, "--tenant-cache", "a=1.5")
    assert run.exit_code != 0 and "from 0.01 to 1" in run.output


def test_a_share_is_a_number(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", line(0, 600, [0, 1]))
    run = invoke("simulate", "--trace", trace, "--tenant-share", "a=much")
    assert run.exit_code == 1
    assert "--tenant-share a=much: must be NAME=SHARE, such as sales=2" in run.output
