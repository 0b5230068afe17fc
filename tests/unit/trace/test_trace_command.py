"""The command `moonpool trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sample_traces import line, write

from moonpool.cli.main import cli
from moonpool.trace.catalogue import PUBLIC_TRACES, PublicTrace
from moonpool.trace.reader import open_trace


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["trace", *arguments])


def error_of(result: Result) -> str:
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("moonpool: ")
    return result.stderr


def test_info_prints_writes_and_draws(tmp_path: Path) -> None:
    text = "".join(line(900 * t, 600, 5, [0, t + 1]) for t in range(60))
    path = write(tmp_path, "a.jsonl", text)
    figures, picture = tmp_path / "f.json", tmp_path / "p.png"
    result = run("info", str(path), "--json", str(figures), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "mooncake, blocks of 512 tokens" in result.stdout
    found = json.loads(figures.read_bytes())
    assert found["requests"] == 60
    assert found["file"]["format"] == "mooncake"
    assert found["blocks"]["hottest_references"][0] == 60
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_info_of_a_trace_without_hashes_and_of_none(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n4.75,396,109\n"
    picture = tmp_path / "p.png"
    result = run("info", str(write(tmp_path, "a.csv", text)), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "no block hashes" in result.stdout
    assert picture.stat().st_size > 10_000
    assert "No such file" in error_of(run("info", str(tmp_path / "none")))
    path = str(write(tmp_path, "b.csv", text))
    assert "cannot write" in error_of(run("info", path, "--plot", str(tmp_path / "no" / "p.png")))
    assert "cannot write" in error_of(run("info", path, "--json", str(tmp_path / "no" / "f.json")))


def test_generate_by_name_by_file_and_like_a_trace(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    profile = str(tmp_path / "p.json")
    result = run("generate", "--requests", "400", "-o", first, "--write-profile", profile)
    assert result.exit_code == 0, result.output
    assert "wrote 400 requests like conversation" in result.stdout
    assert run("generate", "--profile", profile, "--requests", "400", "-o", second).exit_code == 0
    assert Path(first).read_bytes() == Path(second).read_bytes()
    result = run("generate", "--like", first, "--duration", "60", "--rate", "5", "-o", third)
    assert result.exit_code == 0, result.output
    assert 200 < open_trace(third).info.num_rows < 420


def test_generate_reports_mistakes(tmp_path: Path) -> None:
    out = ("-o", str(tmp_path / "a.jsonl"))
    assert "--requests N or --duration" in error_of(run("generate", *out))
    some = ("--requests", "5")
    both = ("--profile", "toolagent", "--like", "x")
    assert "give one of them" in error_of(run("generate", *some, *both, *out))
    assert "use conversation, toolagent" in error_of(
        run("generate", *some, "--profile", "nix", *out)
    )
    wrong = write(tmp_path, "p.json", "{}")
    assert "not a generator profile" in error_of(
        run("generate", *some, "--profile", str(wrong), *out)
    )
    nowhere = str(tmp_path / "no" / "a.jsonl")
    assert "cannot write" in error_of(run("generate", *some, "-o", nowhere))
    assert not (tmp_path / "a.jsonl").exists()


def test_download_reports_its_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no public trace 'nix'; use mooncake-conversation" in error_of(
        run("download", "nix")
    )
    unreachable = PublicTrace(
        file_name="a.csv", url="http://127.0.0.1:1/a.csv", sha256=None, licence="none"
    )
    monkeypatch.setitem(PUBLIC_TRACES, "burstgpt", unreachable)
    result = run("download", "burstgpt", "--to", str(tmp_path))
    assert "cannot reach 127.0.0.1" in error_of(result)
    (tmp_path / "a.csv").write_bytes(b"x")
    result = run("download", "burstgpt", "--to", str(tmp_path))
    assert result.exit_code == 0
    assert "already there, not checked: no sha256 of it is known" in result.stdout


def test_the_help_names_every_public_trace() -> None:
    shown = run("download", "--help").stdout
    assert [name for name in PUBLIC_TRACES if name not in shown] == []
