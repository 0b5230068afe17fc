"""Tests the configurations that commands make of flags and files, without starting a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.cli import serve as serve_module
from moonpool.config.tables import Config
from tests.cli_runner import invoke, succeed


@pytest.mark.parametrize(
    ("flags", "port"), [([], 18765), (["--head-port", "7"], 7), (["--config", "/dev/null"], 8001)]
)
def test_the_head_port_comes_from_flag_then_file_then_default(
    flags: list[str], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[network]\nhead_port = 18765\n")
    ran: list[Config] = []
    monkeypatch.setattr(serve_module, "_run", lambda config, **_: ran.append(config))
    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", "ab" * 32)
    succeed("head", "--config", file, *flags)
    assert ran[0].network.head_port == port


@pytest.mark.parametrize(
    "words",
    [
        "profile random:m30 --threads 0",
        "profile random:m30 --block-size 0",
        "bench engine --repeats 0",
        "bench cached --prefix-tokens 0",
        "bench head --concurrency 0",
    ],
)
def test_a_count_of_zero_is_a_usage_error(words: str) -> None:
    done = invoke(*words.split())
    assert done.exit_code == 2
    assert "x>=1" in done.output


@pytest.mark.parametrize("words", ["bench engine --model random:x", "bench head"])
def test_a_bench_that_cannot_run_says_so_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.suite.engine import engine
    from benchmarks.suite.live import head
    from moonpool_lab.demo.local_server import ServerError

    def no_server(_: object) -> None:
        raise ServerError("it did not start")

    monkeypatch.setattr(head, "bench_head", no_server)
    monkeypatch.setattr(engine, "gemm_flops_per_s", lambda _: 1.0)
    monkeypatch.setattr(engine, "read_bytes_per_s", lambda: 1.0)
    done = invoke(*words.split())
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "serve",
            [
                "Port of the HTTP API.  [default: 8000]",
                "Number of prefill instances.  [default: 1]",
            ],
        ),
        (
            "simulate",
            ["Number of prefill instances.  [default: 8]", "in seconds.  [default: 0.1]"],
        ),
    ],
)
def test_help_tells_what_holds_where_nothing_is_said(command: str, lines: list[str]) -> None:
    done = succeed(command, "--help", terminal_width=110)
    assert [line for line in lines if line not in done.output] == []
