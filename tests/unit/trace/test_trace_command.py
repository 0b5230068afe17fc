"""Tests the command `moonpool trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_traces import line, write

from moonpool.trace.download import PUBLIC_TRACES, PublicTrace
from moonpool.trace.reader import open_trace
from tests.cli_runner import invoke, refusal, succeed


def test_info_prints_writes_and_draws(tmp_path: Path) -> None:
    text = "".join(line(900 * t, 600, 5, [0, t + 1]) for t in range(60))
    path = write(tmp_path, "a.jsonl", text)
    figures, picture = tmp_path / "f.json", tmp_path / "p.png"
    result = succeed("trace", "info", path, "--json", figures, "--plot", picture)
    assert "mooncake, blocks of 512 tokens" in result.stdout
    found = json.loads(figures.read_bytes())
    assert found["requests"] == 60
    assert found["file"]["format"] == "mooncake"
    assert found["blocks"]["hottest_references"][0] == 60
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_info_of_a_trace_without_hashes_and_of_none(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n4.75,396,109\n"
    picture = tmp_path / "p.png"
    result = succeed("trace", "info", str(write(tmp_path, "a.csv", text)), "--plot", picture)
    assert "no block hashes" in result.stdout
    assert picture.stat().st_size > 10_000
    assert "No such file" in refusal("trace", "info", tmp_path / "none")
    path = str(write(tmp_path, "b.csv", text))
    assert "cannot write" in refusal("trace", "info", path, "--plot", tmp_path / "no" / "p.png")
    assert "cannot write" in refusal("trace", "info", path, "--json", tmp_path / "no" / "f.json")


def test_generate_by_name_by_file_and_like_a_trace(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    profile = tmp_path / "p.json"
    result = succeed(
        "trace", "generate", "--requests", "400", "-o", first, "--write-profile", profile
    )
    assert "wrote 400 requests like conversation" in result.stdout
    succeed("trace", "generate", "--profile", profile, "--requests", "400", "-o", second)
    assert Path(first).read_bytes() == Path(second).read_bytes()
    result = succeed(
        "trace", "generate", "--like", first, "--duration", "60", "--rate", "5", "-o", third
    )
    assert 200 < open_trace(third).info.num_rows < 420


def test_generate_reports_mistakes(tmp_path: Path) -> None:
    out = ("-o", tmp_path / "a.jsonl")
    assert "--requests N or --duration" in refusal("trace", "generate", *out)
    some = ("--requests", "5")
    both = ("--profile", "toolagent", "--like", "x")
    assert "give one of them" in refusal("trace", "generate", *some, *both, *out)
    assert "use conversation, toolagent" in refusal(
        "trace", "generate", *some, "--profile", "nix", *out
    )
    wrong = write(tmp_path, "p.json", "{}")
    assert "not a generator profile" in refusal(
        "trace", "generate", *some, "--profile", wrong, *out
    )
    nowhere = tmp_path / "no" / "a.jsonl"
    assert "cannot write" in refusal("trace", "generate", *some, "-o", nowhere)
    assert not (tmp_path / "a.jsonl").exists()


def test_download_reports_its_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no public trace 'nix'; use mooncake-conversation" in refusal(
        "trace", "download", "nix"
    )
    unreachable = PublicTrace(
        file_name="a.csv", url="http://127.0.0.1:1/a.csv", sha256=None, licence="none"
    )
    monkeypatch.setitem(PUBLIC_TRACES, "burstgpt", unreachable)
    assert "cannot reach 127.0.0.1" in refusal("trace", "download", "burstgpt", "--to", tmp_path)
    (tmp_path / "a.csv").write_bytes(b"x")
    result = succeed("trace", "download", "burstgpt", "--to", tmp_path)
    assert "already there, not checked: no sha256 of it is known" in result.stdout


def test_the_help_names_every_public_trace() -> None:
    shown = invoke("trace", "download", "--help").stdout
    assert [name for name in PUBLIC_TRACES if name not in shown] == []
