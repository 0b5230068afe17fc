"""Tests log lines as text and as JSON, a terminal's progress bar, and the sources of level and
format."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from moonpool.cli.logs import JsonFormatter, TextFormatter, choose_logging, set_up_logging
from moonpool.config.tables import TelemetryConfig


def a_record(message: str, *words: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("wrong")
        except ValueError:
            info = sys.exc_info()
    record = logging.LogRecord("moonpool.x", logging.INFO, "", 1, message, words, info)
    record.created = 1795501195.123
    return record


def test_text_has_an_iso_instant_in_utc() -> None:
    line = TextFormatter("50%").format(a_record("%d left", 3))
    assert line == "2026-11-24T06:19:55.123Z 50% INFO 3 left"


def test_json_is_one_line_with_the_fields_of_the_message() -> None:
    record = a_record("two\nlines", error=True)
    record.fields = {"request_id": "r-1", "total_s": 0.5}
    line = JsonFormatter("head").format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["time"] == "2026-11-24T06:19:55.123Z"
    assert (found["process"], found["level"], found["message"]) == ("head", "info", "two\nlines")
    assert (found["request_id"], found["total_s"]) == ("r-1", 0.5)
    assert "ValueError: wrong" in found["exception"]


def test_auto_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("MOONPOOL_LOG_FORMAT", "text")
    choose_logging(TelemetryConfig(log_format="json"))
    assert os.environ["MOONPOOL_LOG_LEVEL"] == "WARNING"
    assert os.environ["MOONPOOL_LOG_FORMAT"] == "json"


def test_an_unknown_level_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONPOOL_LOG_LEVEL", "loud")
    with pytest.raises(SystemExit):
        set_up_logging("head")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "MOONPOOL_LOG_LEVEL='loud'" in shown


LOADS = """
import logging, itertools
from moonpool.cli.logs import set_up_logging
from moonpool_engine.engine.load_progress import reported
set_up_logging("decode-0")
clock = itertools.count()
list(reported(range(4), lambda: 2 * next(clock)))
logging.getLogger("moonpool").info("ready")
"""


def logged(on_terminal: bool, **variables: str) -> str:
    """Returns what a process that loads four layers, one in two seconds, writes to stderr."""
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"} | variables
    try:
        subprocess.run([sys.executable, "-c", LOADS], stderr=theirs, env=environment, check=True)
        return os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_has_a_bar_that_the_next_line_replaces() -> None:
    *bars, last = logged(on_terminal=True).removesuffix("\x1b[K\r\n").split("\x1b[K\r")
    assert bars == [
        f"decode-0 [{'#' * n * 6}{'.' * (4 - n) * 6}] loading weights: {n} of 4 layers"
        for n in range(4)
    ]
    assert last.endswith("Z decode-0 INFO ready")
    narrow = logged(on_terminal=True, COLUMNS="40").split("\x1b[K\r")
    assert all(len(bar) == 39 for bar in narrow[:4])


@pytest.mark.parametrize(
    ("on_terminal", "variables"),
    [(False, {}), (True, {"TERM": "dumb"}), (True, {"MOONPOOL_LOG_FORMAT": "json"})],
)
def test_a_log_has_lines_and_no_bar(on_terminal: bool, variables: dict[str, str]) -> None:
    lines = logged(on_terminal, **variables).splitlines()
    assert len(lines) == 2 and "loading weights: 2 of 4 layers" in lines[0] and "ready" in lines[1]
    assert "\x1b" not in "".join(lines)
