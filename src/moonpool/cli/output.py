"""How the commands speak: one clear line for an error, and a way to write figures."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

COUNT = click.IntRange(min=1)


def fail(message: str) -> NoReturn:
    """Ends the command with one line on stderr and status 1."""
    sys.stderr.write(f"moonpool: {' '.join(message.split())}\n")
    sys.stderr.flush()
    raise SystemExit(1)


def set_up_logging(name: str) -> None:
    """One line per message on stderr, with the process's name. `MOONPOOL_LOG_LEVEL` sets the
    level."""
    level = os.environ.get("MOONPOOL_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        fail(f"MOONPOOL_LOG_LEVEL={level!r} is no log level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(
        level=level, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Writes what a command found, if a file was asked for."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    try:
        Path(path).write_bytes(text + b"\n")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
