"""The output of commands: errors of one line, and figures with their origin."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from moonpool import __version__


def fail(*messages: str) -> NoReturn:
    """Ends the command with one line on stderr for each message, and status 1. Raises
    SystemExit."""
    for message in messages:
        sys.stderr.write(f"moonpool: {' '.join(message.split())}\n")
    sys.stderr.flush()
    raise SystemExit(1)


def check_folders(*paths: str | None) -> None:
    """Ends the command, before its work, if a file to write has no folder."""
    for path in paths:
        if path is not None and not Path(path).parent.is_dir():
            fail(f"cannot write {path}: there is no folder {Path(path).parent}")


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Ends the command with the text of any of these errors."""
    try:
        yield
    except errors as error:
        fail(str(error))


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Ends the command where the file cannot be written."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def write_page(path: str, page: str) -> None:
    with writing(path):
        Path(path).write_text(page, encoding="utf-8")


def need_package(name: str) -> None:
    """Raises ModuleNotFoundError, before the command's work, if a package that it will import is
    absent; `main` prints it as one line."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(name=name)


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, unless `path` is None."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    with writing(path):
        Path(path).write_bytes(text + b"\n")


def show_figures(found: dict[str, Any], json_file: str | None) -> None:
    """Prints measured figures as JSON with their origin, and writes them (adds to `found`)."""
    found["origin"] = origin()
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    write_json(json_file, found)


def origin() -> dict[str, str]:
    """Returns command, version, commit and machine, because figures without these cannot be
    repeated."""
    from moonpool.cores import cpu_name

    return {
        "command": "moonpool " + " ".join(without_keys(sys.argv[1:])),
        "version": __version__,
        "commit": _commit(),
        "machine": f"{platform.machine()}, {cpu_name()}, Python {platform.python_version()}",
    }


def without_keys(words: list[str]) -> list[str]:
    """Returns the command line without its API keys, because figures are passed on."""
    shown = [re.sub(r"^--api-key=.*", "--api-key=...", word, flags=re.S) for word in words]
    return [
        "..." if number and shown[number - 1] == "--api-key" else word
        for number, word in enumerate(shown)
    ]


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run(  # noqa: S603 - fixed arguments
        [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
