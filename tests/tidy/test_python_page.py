"""Every snippet of docs/python.md runs without changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked.commands import run_command

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    (command,) = re.findall(r"```sh\nmoonpool (.*)\n```", PAGE)
    run_command(*command.split(), folder=folder, timeout_s=300).check_returncode()
    return folder


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 5


@pytest.mark.long
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippet_runs(folder: Path, snippet: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
