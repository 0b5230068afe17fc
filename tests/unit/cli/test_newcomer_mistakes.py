"""Tests typical input of a newcomer: misspelt commands and addresses, and a key from the
environment."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from test_options import COMMANDS

import moonpool.cli.serve as serve
from moonpool.cli.main import SuggestingGroup, main
from moonpool.cli.watch.cluster_events import time_text
from moonpool.cli.watch.status import status_lines
from moonpool.plugins import engines, entry_points
from tests.cli_runner import invoke
from tests.http_server import QuietHandler, serving

ROOT = Path(__file__).parents[3]
KEYS = ("MOONPOOL_ADMIN_KEY", "MOONPOOL_API_KEY", "OPENAI_API_KEY")


class Refusing(QuietHandler):
    """Keeps path and key of each request, and refuses the request."""

    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("authorization", "")))
        self.answer(b'{"error": {"message": "this key is refused"}}', 401)


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields a server's HOST:PORT, and the requests that it got."""
    seen: list[tuple[str, str]] = []
    handler = type("Handler", (Refusing,), {"seen": seen})
    with serving(handler) as place:
        yield place, seen


@pytest.mark.parametrize(
    ("typed", "near"), [("simulat", "simulate"), ("server", "serve"), ("replya", "replay")]
)
def test_a_command_that_is_nearly_right_is_named(typed: str, near: str) -> None:
    result = invoke(typed, "--trace", "x")
    assert result.exit_code == 2
    assert f"No such command {typed!r}. Did you mean {near!r}?" in result.output


@pytest.mark.parametrize(
    ("group", "typed", "near"),
    [
        ("bench", "engin", "engine"),
        ("bench", "capacty", "capacity"),
        ("pool", "audt", "audit"),
        ("trace", "inf", "info"),
        ("config", "chekc", "check"),
    ],
)
def test_a_command_of_a_group_that_is_nearly_right_is_named(
    group: str, typed: str, near: str
) -> None:
    result = invoke(group, typed)
    assert result.exit_code == 2
    assert f"No such command {typed!r}. Did you mean {near!r}?" in result.output


def test_every_group_suggests() -> None:
    groups = [command for command in COMMANDS.values() if isinstance(command, click.Group)]
    assert len(groups) >= 5
    assert all(isinstance(group, SuggestingGroup) for group in groups)


def test_a_command_like_no_other_gets_no_suggestion() -> None:
    result = invoke("xyzzy")
    assert result.exit_code == 2
    assert "No such command 'xyzzy'." in result.output and "mean" not in result.output


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["status"], "/cluster/events"),
        (["top", "--once"], "/cluster/events"),
        (["upgrade"], "/cluster"),
        (["pool", "stat", "--url"], "/cluster"),
        (["rewind"], "/cluster/event_log"),
    ],
)
def test_host_and_port_are_an_address_and_the_operators_key_is_sent(
    words: list[str],
    path: str,
    server: tuple[str, list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, seen = server
    for name in KEYS:
        monkeypatch.setenv(name, f"sk-{name}")
    result = invoke(*words, address)
    assert result.exit_code == 1
    assert result.stderr.startswith("moonpool: the API key is missing or invalid: give --api-key")
    assert "MOONPOOL_API_KEY" in result.stderr and result.stderr.count("\n") == 1
    assert seen == [(path, "Bearer sk-MOONPOOL_ADMIN_KEY")]


@pytest.mark.parametrize("has_key_for_others", [False, True])
def test_a_trial_of_anybodys_server_sends_it_no_key_of_moonpools(
    has_key_for_others: bool,
    server: tuple[str, list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, seen = server
    for name in KEYS:
        monkeypatch.setenv(name, f"sk-{name}")
    if not has_key_for_others:
        monkeypatch.delenv("OPENAI_API_KEY")
    result = invoke("trial", f"http://{address}")
    assert result.exit_code != 0 and seen
    sent = "Bearer sk-OPENAI_API_KEY" if has_key_for_others else ""
    assert {key for _, key in seen} == {sent}


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def found(name: str, *others: Any) -> Any:
        return None if name == package else find_spec(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(serve, "find_spec", found)
    if package == "moonpool_engine":
        monkeypatch.setattr(engines, "entry_points", lambda group: {})
    if package == "moonpool_lab":
        known = entry_points.entry_points
        others = lambda group: {} if group == "moonpool.plots" else known(group)  # noqa: E731
        monkeypatch.setattr(entry_points, "entry_points", others)


def test_events_without_pyzmq_are_one_line_and_no_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without("zmq", monkeypatch)
    result = invoke(
        "serve", "a-model", "--port", "0", "--vllm", "http://127.0.0.1:9,tcp://127.0.0.1:9"
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("moonpool: vLLM's KV events need pyzmq, which is not installed")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["plan", "--trace", "t.jsonl"], "scipy", "plan"),
        (["plan", "--trace", "t.jsonl", "--plot", "p.png"], "moonpool_lab", "lab"),
        (["trial", "127.0.0.1:1"], "scipy", "plan"),
        (["bench", "capacity", "127.0.0.1:1"], "scipy", "plan"),
        (["profile", "--plot", "p.png"], "matplotlib", "lab"),
        (["profile"], "moonpool_engine", "engine"),
        (["serve", "--port", "0"], "moonpool_engine", "engine"),
        (["demo"], "moonpool_engine", "engine"),
    ],
)
def test_a_package_that_is_absent_is_told_before_any_work(
    words: list[str],
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without(package, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(args=words, prog_name="moonpool")
    shown = capsys.readouterr()
    assert ended.value.code == 1 and shown.out == ""
    assert shown.err.startswith(f"moonpool: this needs {package}, which is not installed: ")
    where = f"'{ROOT}[{extra}]'" if extra == "plan" else f"{ROOT}/{extra}"
    assert f"install -e {where}\n" in shown.err and shown.err.count("\n") == 1


def test_a_plan_without_a_plot_does_not_import_what_draws() -> None:
    script = (
        "import sys; from moonpool.cli.main import cli\n"
        "sys.modules['matplotlib'] = None  # its import fails\n"
        "cli(['plan', '--trace', 'none.jsonl'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("moonpool: cannot read none.jsonl")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.02851, "28.5 ms"), (0.9996, "1.00 s"), (2.657, "2.66 s"), (10.25, "10.25 s")],
)
def test_long_times_are_seconds(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
    found = {"p50": seconds}
    totals = {
        "answered": 1,
        "effective": 1,
        "ttft_s": found,
        "tbt_s": found,
        "tokens": {"dram": 0, "fetched": 0, "ssd": 0, "computed": 1},
        "not_answered": {},
    }
    slo = {"ttft_s": 30.0, "tbt_s": 0.5}
    frame = {"totals": totals, "slo": slo, "instances": [], "tenant": None, "under_way": 0}
    (line,) = (line for line in status_lines(frame) if line.startswith("latency"))
    assert line == f"latency    TTFT p50 {text} (SLO 30.00 s); TBT p50 {text} (SLO 500 ms)"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_missing_trace_is_told_with_what_can_take_its_place(command: str) -> None:
    result = invoke(command)
    assert result.exit_code == 2
    line = result.output.splitlines()[-1]
    assert line.startswith("Error: Missing option '--trace'. Give a log with the columns")
    columns, make = line.split("columns ")[1].split(", or make a trace: moonpool ")
    assert "prompt_tokens and completion_tokens" in columns
    words = make.split()
    COMMANDS["moonpool trace generate"].make_context("generate", words[2:])
