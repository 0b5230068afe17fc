"""Log lines of a process: text, or one JSON object each, with instants in ISO 8601 (UTC)."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

import click

from moonpool.cli.output import fail
from moonpool.config.tables import LOG_FORMATS, LOG_LEVELS, TelemetryConfig

F = TypeVar("F", bound=Callable[..., Any])

LEVEL_VARIABLE = "MOONPOOL_LOG_LEVEL"
FORMAT_VARIABLE = "MOONPOOL_LOG_FORMAT"
AUTO = "auto"
BAR_COLUMNS = 24
CLEAR_REST = "\x1b[K"


def choose_logging(telemetry: TelemetryConfig) -> None:
    """Puts level and format of the log into the environment, for this process and all that it
    starts."""
    for variable, value in (
        (LEVEL_VARIABLE, telemetry.log_level),
        (FORMAT_VARIABLE, telemetry.log_format),
    ):
        if value != AUTO:
            os.environ[variable] = value


def log_options(command: F) -> F:
    """Adds `--log-level` and `--log-format` to a command without a configuration."""
    for flag, values, what, variable in (
        ("--log-format", LOG_FORMATS, "Form of log lines", FORMAT_VARIABLE),
        ("--log-level", LOG_LEVELS, "Least level of log lines", LEVEL_VARIABLE),
    ):
        text = f"{what}; auto takes {variable} of the environment."
        command = click.option(flag, type=click.Choice(values), default=AUTO, help=text)(command)
    return command


def set_up_logging(name: str) -> None:
    """Logs one line per message to stderr, with the process's name. Ends the command if a variable
    of the environment has an unknown level or form."""
    level = os.environ.get(LEVEL_VARIABLE, "info").lower()
    form = os.environ.get(FORMAT_VARIABLE, "text").lower()
    for variable, value, known in (
        (LEVEL_VARIABLE, level, LOG_LEVELS),
        (FORMAT_VARIABLE, form, LOG_FORMATS),
    ):
        if value not in known or value == AUTO:
            names = ", ".join(each for each in known if each != AUTO)
            fail(f"{variable}={value!r} is unknown; use one of {names}")
    drawn = form == "text" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    handler = TerminalHandler(name) if drawn else logging.StreamHandler()
    handler.setFormatter(JsonFormatter(name) if form == "json" else TextFormatter(name))
    if not drawn:
        handler.addFilter(lambda record: not getattr(record, "only_drawn", False))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _instant(record: logging.LogRecord) -> str:
    whole = datetime.fromtimestamp(record.created, UTC)
    return whole.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z decode-0 WARNING ...`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process.replace('%', '%%')} %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _instant(record)


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Lines of a terminal. A record with `done` and `total` is a progress bar. After a bar the
    cursor returns to the start of the line, and each record clears the rest of its line, so the
    next record from any process on this terminal replaces the bar."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        self.terminator = f"{CLEAR_REST}\r" if hasattr(record, "total") else f"{CLEAR_REST}\n"
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        state = vars(record)
        if "total" not in state:
            return super().format(record)
        filled = BAR_COLUMNS * state["done"] // state["total"]
        bar = "#" * filled + "." * (BAR_COLUMNS - filled)
        columns = shutil.get_terminal_size().columns
        return f"{self._process} [{bar}] {record.getMessage()}"[: columns - 1]


class JsonFormatter(logging.Formatter):
    """Writes each log record as a JSON object on one line. Values that a message carries as
    `fields` stand beside it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)
