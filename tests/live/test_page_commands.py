"""Runs what the pages tell a reader to type: commands, calls by curl, and snippets of clients.

This is a long sweep. Commands that need a network, other machines or minutes are named with the
reason in `page_commands.NOT_RUN`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked.commands import LocalServer, run_command
from tests.live.calls import fresh
from tests.live.page_commands import (
    NOT_RUN,
    PAGES,
    ROOT,
    SHORT_TRACE,
    TINY,
    Line,
    curl_lines,
    moonpool_lines,
    words_here,
)

NAME = "Qwen/Qwen3-0.6B"
ASKED_ID = "asked-before-the-log-is-saved"
LINES = moonpool_lines()
SERVES = [line for line in LINES if line.command == "serve" and not line.not_run]
RUNS = [line for line in LINES if line.command != "serve" and not line.not_run]
FILES = {"least_loaded.py", "short_prompts.py", "deepest_first.py", "own_log.py"}

OWN_LOG = "timestamp,prompt_tokens,completion_tokens\n" + "".join(
    f"{0.5 * number},{100 + 40 * (number % 7)},{8 + number % 5}\n" for number in range(60)
)

pytestmark = [pytest.mark.live, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a working directory with the files that the pages show, and a trace by each name."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S):
            (folder / name).write_text(code)
    assert {path.name for path in folder.glob("*.py")} == FILES
    more, prices = re.findall(
        r"```toml\n(\[devices.*?)```", (ROOT / "docs" / "simulation.md").read_text(), re.S
    )
    (folder / "more.toml").write_text(more)
    (folder / "prices.toml").write_text(prices)
    (written,) = re.findall(
        r"^cat > keys.*?^END$", (ROOT / "docs" / "serving.md").read_text(), re.S | re.M
    )
    subprocess.run(["bash", "-c", written], cwd=folder, check=True)
    (folder / "traces").mkdir()
    for path, num in (("traces/conversation_trace.jsonl", "200"), (SHORT_TRACE, "6")):
        made = run_command("trace", "generate", "--requests", num, "-o", path, folder=folder)
        assert made.returncode == 0, made.stderr
    (folder / "requests.csv").write_text(OWN_LOG)
    measured = ("profile", TINY, "--curve-time", "2", "--json", "profile.json")
    assert run_command(*measured, timeout_s=300, folder=folder).returncode == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    words = ["moonpool/induction", "--decode", "2", "--served-model-name", NAME]
    with LocalServer(words) as server:
        body = {"prompt": "one two one", "max_tokens": 4}
        headers = {"x-request-id": ASKED_ID}
        answer = fresh.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.headers["x-request-id"] == ASKED_ID
        yield server


def test_a_command_runs_or_the_reason_is_told() -> None:
    assert len(RUNS) > 50 and len(SERVES) > 8
    texts = [line.text for line in LINES]
    stale = [start for start in NOT_RUN if not any(text.startswith(start) for text in texts)]
    assert not stale, "no page has a command that begins so"


@pytest.mark.parametrize("line", SERVES, ids=lambda line: line.text)
def test_a_command_serves(line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    key = {"authorization": "Bearer sk-90ab773c11"}
    words = words_here(line, "http://127.0.0.1:8000", folder)
    with LocalServer(words[1:]) as server:
        body = {"prompt": "one two one", "max_tokens": 4}
        answer = fresh.post(f"{server.url}/v1/completions", json=body, headers=key, timeout=60)
        assert answer.status_code == 200, answer.text


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.text)
def test_a_command_ends_well(line: Line, folder: Path, server: LocalServer) -> None:
    words = words_here(line, server.url, folder)
    if "--request" in words:
        words[words.index("--request") + 1] = ASKED_ID
    done = run_command(*words, timeout_s=1400, folder=folder)
    # The page's profile is of another server, so the figures may differ.
    if line.command == "compare":
        assert "hit ratio" in done.stdout and "not comparable" not in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for flag in ("--json", "--report", "-o", "--plot", "--save"):
        if flag in words:
            assert (folder / words[words.index(flag) + 1]).stat().st_size > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", curl_lines(), ids=lambda line: line.text)
def test_a_call_by_curl_is_answered(line: Line, server: LocalServer) -> None:
    text = re.sub(r"(http://127.0.0.1|localhost):8000", server.url, line.text)
    # uses the name of this server's model in place of an adapter's name
    words = shlex.split(text.replace('"model": "poet"', f'"model": "{NAME}"'))
    done = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer
    assert answer.get("choices") or answer["data"]


def test_the_snippet_of_the_openai_client_prints_an_answer(server: LocalServer) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    (snippet,) = re.findall(r"```python\n(from openai.*?)```", text, re.S)
    snippet = snippet.replace("http://127.0.0.1:8000", server.url)
    snippet = snippet.replace("stream=True", "stream=True, max_tokens=16")
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
