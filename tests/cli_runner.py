"""Runs commands of moonpool within the process of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from moonpool.cli.main import cli


def invoke(*words: str | Path, **settings: Any) -> Result:
    """Runs a command, which may end with a status but not with an exception."""
    done = CliRunner().invoke(cli, [str(word) for word in words], **settings)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def succeed(*words: str | Path, **settings: Any) -> Result:
    """Runs a command that must end well."""
    done = invoke(*words, **settings)
    assert done.exit_code == 0, done.output
    return done


def figures_of(path: Path, *words: str | Path) -> dict[str, Any]:
    """Returns what a command writes to a file by --json."""
    succeed(*words, "--json", path)
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def refusal(*words: str | Path) -> str:
    """Returns the one line of a command that must end with an error, and print nothing else."""
    done = invoke(*words)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1, done.output
    assert done.stderr.startswith("moonpool: ") and not done.stdout
    return done.stderr
