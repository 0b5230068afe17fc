"""`moonpool trial` finds nothing wrong with a right server, and finds each fault of a wrong
server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runner import invoke, refusal
from tests.forked.commands import LocalServer
from tests.live.faulty_proxy import faulty_proxy

SERVE = ["--mixed", "1", "--prefill", "0", "--decode", "0", "--admission", "none"]
SERVE += ["--block-size", "16", "--slo-ttft", "300", "--slo-tbt", "100", "--drain-seconds", "1"]
BRIEF = ["--families", "2", "--repeats", "2", "--max-tokens", "24", "--requests", "60"]
BRIEF += ["--concurrency", "8", "--seed", "7", "--fill-words", "1500"]


@pytest.fixture(scope="module")
def right_server() -> Iterator[LocalServer]:
    """Serves the built-in model, with a cache so small that fillers evict its blocks."""
    with LocalServer([*SERVE, "--kv-tokens", "16384"]) as server:
        yield server


def run_trial(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    file = folder / "trial.json"
    done = invoke("trial", *arguments, *BRIEF, "--json", file)
    assert file.exists(), done.output
    figures: dict[str, Any] = json.loads(file.read_text())["servers"][0]
    return done.exit_code, done.output, figures


@pytest.mark.long
@pytest.mark.live
def test_nothing_is_found_where_nothing_is_wrong(right_server: LocalServer, tmp_path: Path) -> None:
    code, output, figures = run_trial(tmp_path, right_server.url, "--may-reset-cache")
    assert code == 0, output
    assert "no wrong answer found" in output
    for phase in ("quiet", "load"):
        assert figures[phase]["differing"] == figures[phase]["foreign"] == 0
        assert set(figures[phase]["failed"]) <= {"refused"}
    assert figures["load"]["answered"] > 40
    assert figures["load"]["facts"] > 25, "the built-in model names the codes"
    assert figures["load"]["cached_tokens"] > 0
    assert figures["disturbances"]["cache resets"] == 3
    assert figures["references_with_logprobs"] == figures["references"] == 12


FOUND = {"drop": "missing", "double": "doubled", "mix": "wrong"}


@pytest.mark.long
@pytest.mark.live
@pytest.mark.parametrize(
    "fault",
    ["drop", "mix", "double"],
)
def test_changed_tokens_are_found(right_server: LocalServer, tmp_path: Path, fault: str) -> None:
    with faulty_proxy(right_server.url, fault) as (url, proxy):
        code, output, figures = run_trial(tmp_path, url)
    assert proxy.planted > 0
    assert code == 1, output
    assert "WRONG ANSWERS" in output
    kinds = figures["load"]["kinds"]
    assert kinds[FOUND[fault]] >= max(kinds.get(kind, 0) for kind in FOUND.values()), kinds
    assert figures["load"][f"{FOUND[fault]}_tokens"] > 0


@pytest.mark.long
@pytest.mark.live
def test_answers_of_others_are_foreign(right_server: LocalServer, tmp_path: Path) -> None:
    with faulty_proxy(right_server.url, "swap") as (url, proxy):
        code, output, figures = run_trial(tmp_path, url)
    assert code == 1, output
    assert proxy.planted > 0
    assert "text of other conversations" in output
    assert 0 < figures["load"]["foreign"] + figures["quiet"]["foreign"] <= proxy.planted


@pytest.mark.long
@pytest.mark.live
@pytest.mark.parametrize("fault", ["hang", "cut"])
def test_streams_that_do_not_end_are_found(
    right_server: LocalServer, tmp_path: Path, fault: str
) -> None:
    with faulty_proxy(right_server.url, fault) as (url, proxy):
        limit = ["--timeout", "5" if fault == "hang" else "60"]
        code, output, figures = run_trial(tmp_path, url, *limit)
    kind = "hung" if fault == "hang" else "cut"
    count = figures["quiet"]["failed"].get(kind, 0) + figures["load"]["failed"].get(kind, 0)
    assert code == 3, output
    assert count > 0
    assert fault == "hang" or count <= proxy.planted
    assert "were cut or hung" in output


@pytest.mark.live
@pytest.mark.long
def test_a_restart_in_the_middle_costs_no_right_answer(tmp_path: Path) -> None:
    """The restart command writes its order into a file; the test reads the order, and kills and
    starts the server."""
    with LocalServer([*SERVE, "--kv-tokens", "16384"]) as server:
        script = tmp_path / "restart.py"
        script.write_text(RESTART)
        arguments = [str(server.pid), str(server.port), str(tmp_path / "pid"), *SERVE]
        command = " ".join([sys.executable, str(script), *arguments])
        try:
            code, output, figures = run_trial(tmp_path, server.url, "--restart-command", command)
        finally:
            pid_file = tmp_path / "pid"
            if pid_file.exists():
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert code == 0, output
    assert figures["disturbances"]["restarts"] == 2
    assert figures["load"]["differing"] == 0


RESTART = """
import os, signal, subprocess, sys, time
first, port, pid_file, *serve = sys.argv[1:]
pid = int(open(pid_file).read()) if os.path.exists(pid_file) else int(first)
os.kill(pid, signal.SIGKILL)
time.sleep(1)
line = [sys.executable, "-m", "moonpool", "serve", *serve, "--port", port]
started = subprocess.Popen(line, start_new_session=True, stderr=subprocess.DEVNULL)
open(pid_file, "w").write(str(started.pid))
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["http://a", "http://b", "--restart-command", "x"], "give one URL"),
        (["http://a", "--restart-command", "'"], "cannot be split"),
        (["http://a", "--restart-command", " "], "is empty"),
        (["nonsense://x"], "is no http or https address"),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], words: str) -> None:
    assert words in refusal("trial", *arguments)
