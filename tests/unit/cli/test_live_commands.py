"""One line for each mistake of the commands that need a live server."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.cli.main import cli


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["profile", "--url", ":::"], "no http or https address"),
        (["profile", "--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["replay", "--trace", "none.jsonl"], "none.jsonl"),
        (["bench", "overload", "--admissions", "early,never"], "use some of none, baseline"),
        (["bench", "overload", "--loads", "1,x"], "no list of numbers"),
        (["bench", "peers-live"], "--peer-url"),
        (["bench", "agreement", "--scale-tokens", "3"], "not above 0 and at most 1"),
        (["compare", "nothing.json", "nothing.json"], "cannot read the figures nothing.json"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code != 0
    assert error in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
