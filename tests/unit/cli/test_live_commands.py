"""Commands that need a live server give one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_runner import invoke

TINY = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=8192"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["profile", "--url", ":::"], "no http or https address"),
        (["profile", "--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["profile", "127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["profile", "127.0.0.1:1", "--url", "127.0.0.1:2"], "give one server, not"),
        (["profile", "a/model", "another"], "give one model, not a/model and another"),
        (["profile", "h:1", "random:hidden=1", "--attention"], "model 'random:hidden=1': head_dim"),
        (["profile", "--beliefs"], "--beliefs needs the URL of a server"),
        (["replay", "h:1", "--url", "h:2", "--trace", "t"], "give the address of the server once"),
        (["replay", "--trace", "none.jsonl"], "none.jsonl"),
        (["bench", "overload", "--admissions", "early,never"], "use some of none, baseline"),
        (["bench", "overload", "--loads", "1,x"], "no list of numbers"),
        (["bench", "peers-live"], "give the URL of one that runs, or --peer-python"),
        (["bench", "agreement", "--scale-tokens", "3"], "not above 0 and at most 1"),
        (["compare", "nothing.json", "nothing.json"], "cannot read the figures nothing.json"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code != 0
    assert error in result.output
    assert "Traceback" not in result.output


def test_step_times_that_are_kept_are_listed_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = ["profile", TINY, "--curve-time", "0.1", "--no-save"]
    assert "kept in" not in invoke(*measured).output
    folder = tmp_path / "moonpool" / "profiles"
    assert invoke("profile", "--list").output == f"0 profiles kept in {folder}\n"
    kept = invoke(*measured[:-1]).output.splitlines()[-1]
    listed = invoke("profile", "--list").output
    assert kept.removeprefix("kept in ") in listed and "llama, 2 layers" in listed
    cleared = invoke("profile", "--clear").output
    assert cleared.endswith(f"1 profile deleted in {folder}\n") and list(folder.iterdir()) == []
